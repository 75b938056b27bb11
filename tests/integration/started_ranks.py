"""Ranks that are started as a user starts them: by a launcher, or by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import shared_segments

LIMIT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(port: int) -> dict[str, str]:
    """A rank's, without what a launcher would have set."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**kept, **threads, **address, "DS_ACCELERATOR": "cpu", "PATH": path}


def start(way: str, script: Path, folder: Path, results: Path, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run ``script`` with a folder to read and one for its results; what each rank wrote into the latter, as JSON.

    ``way`` is ``deepspeed``, ``torchrun`` or ``plain``, which sets no LOCAL_RANK.
    """
    port = free_port()
    command = [str(script), str(folder), str(results), *arguments]
    plain = environment(port)
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    commands = {
        "deepspeed": [
            [sys.executable, deepspeed, "--master_port", str(port), "--num_accelerators", str(ranks), *command]
        ],
        "torchrun": [
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            + ["--master-port", str(port), *command]
        ],
        "plain": [[sys.executable, *command]] * ranks,
    }[way]
    try:
        processes = []
        for rank, command in enumerate(commands):
            own = {**plain, "RANK": str(rank), "WORLD_SIZE": str(ranks)} if way == "plain" else plain
            processes.append(
                subprocess.Popen(
                    command,
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes), "\n".join(outputs)[-6000:]
    finally:
        for process in processes:
            # A launcher that is killed leaves its ranks.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shared_segments.remove(shared_segments.named_after([port]))
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]
