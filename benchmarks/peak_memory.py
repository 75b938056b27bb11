"""The peak resident memory of a process, measured in one that has no past."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MMAP_THRESHOLD_BYTES = 64 * 1024


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """Runs a function of a module in a new interpreter that has this rank's environment variables.

    glibc reads its threshold when a process starts. Fixed, it has tensors given back to the system as they are freed;
    left to itself, it grows with the tensors, and half a model of freed blocks stays resident in one run of two.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD_BYTES)
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


class HighWaterMark:
    """The peak resident memory of this process between two looks at it, above the level at its start.

    Linux only: `ru_maxrss` would not do, since a process inherits its parent's peak and cannot reset it.
    """

    def __init__(self) -> None:
        self._baseline_bytes = self._read_bytes("VmRSS") - self._others_bytes()
        self._reset()

    def take_bytes(self) -> int:
        """The peak since the last look, with this rank's part of what ranks share; the next starts at what is there."""
        peak_bytes = self._read_bytes("VmHWM") - self._others_bytes() - self._baseline_bytes
        self._reset()
        return peak_bytes

    def _others_bytes(self) -> int:
        """The other ranks' parts of what is shared now."""
        ranks = int(os.environ["WORLD_SIZE"])
        return self._read_bytes("RssShmem") * (ranks - 1) // ranks

    @staticmethod
    def _reset() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # see proc_pid_clear_refs(5)

    @staticmethod
    def _read_bytes(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}; peak memory can only be measured on Linux")
