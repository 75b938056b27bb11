"""Starts a script of examples/ under the `deepspeed` launcher, as a user does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests import shared_segments
from tests.integration.loading import EXAMPLES

LIMIT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    ranks: int, *arguments: str | Path, example: str, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    port = free_port()
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--master_port", str(port)]
    command = [*launcher, "--num_accelerators", str(ranks), str(EXAMPLES / example), *map(str, arguments)]
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    finally:
        shared_segments.remove(shared_segments.named_after([port]))  # DeepSpeed leaves them behind
