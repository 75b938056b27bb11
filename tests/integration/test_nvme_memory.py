"""A model on NVMe takes the memory of what is being computed, not its own: when it is built, loaded and used."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("switch_on_nvme.py")
GIB = 2**30
MODES = ("build", "build under a limit of the system", "load")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(mode: str, folder: Path, shape: tuple[int, int, int], cap_bytes: int) -> dict[str, int]:
    environment = {
        **os.environ,
        # Else glibc keeps the addresses of what was freed, and the limit counts those. It cannot be set later.
        **({"MALLOC_MMAP_THRESHOLD_": "65536"} if cap_bytes else {}),
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, str(SCRIPT), mode, str(folder), *map(str, shape), str(cap_bytes)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1]) if mode != "save" else {}


def check(mode: str, folder: Path, shape: tuple[int, int, int], limit_bytes: float) -> None:
    if mode == "load":
        run("save", folder, shape, cap_bytes=0)
    is_capped = mode == "build under a limit of the system"
    figures = run("build" if is_capped else mode, folder, shape, int(limit_bytes) if is_capped else 0)
    print(mode, shape, figures)
    assert figures["model_bytes"] > 2 * limit_bytes, "a model that would not fit"
    assert figures["peak_bytes"] < limit_bytes
    assert not list(folder.rglob("*.swp"))


@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])])
def test_model_of_twice_its_memory(mode: str, tmp_path: Path) -> None:
    check(mode, tmp_path, (16, 4, 16_000), limit_bytes=0.2 * GIB)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_model_of_two_and_a_half_times_its_memory(mode: str, tmp_path: Path) -> None:
    """The shape of the report, scaled down: many experts, an embedding ten times the buffer, 2.6 GiB in 1.0."""
    check(mode, tmp_path, (32, 12, 128_000), limit_bytes=1.0 * GIB)
