"""How fast the I/O op moves pinned memory to and from a file, past the page cache, against fio on the same file system.

fio's own memory is small pages, which some virtual disks serve at half the speed; the better of its two depths counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Rank
from benchmarks.figure import Better, Figure

BLOCK_BYTES = 1 << 20
QUEUE_DEPTHS = (8, 32)
PIECES = 8
GB = 1e9


def measure(rank: Rank) -> list[Figure]:
    """Medians of rounds in which fio and the op take turns. The file is new for every write."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    began_s = time.perf_counter()
    op = AsyncIOBuilder().load()
    load_s = time.perf_counter() - began_s
    n_bytes = rank.choose(full=1 << 30, quick=1 << 26)
    path = rank.scratch_dir / "file"
    op_rates, fio_rates = [], []
    for _ in range(rank.choose(full=3, quick=1)):
        fio_rates.append([max(fio(path, n_bytes, way, depth) for depth in QUEUE_DEPTHS) for way in ("write", "read")])
        op_rates.append([max(pair) for pair in zip(*(write_and_read(op, path, n_bytes, d) for d in QUEUE_DEPTHS))])
    figures = [Figure("first load of async_io", load_s, "s")]
    for index, way in enumerate(("write", "read")):
        rate, fio_rate = (sorted(round_[index] for round_ in rates)[len(rates) // 2] for rates in (op_rates, fio_rates))
        figures.append(Figure(f"I/O op, {way}", rate, "GB/s", Better.HIGHER))
        if fio_rate > 0:
            figures.append(Figure(f"I/O op, {way} / fio", rate / fio_rate, "× fio", Better.HIGHER))
    return figures


def write_and_read(op: Any, path: Path, n_bytes: int, queue_depth: int) -> list[float]:
    """GB/s of a write to a new file, and of a read of it."""
    import torch

    path.unlink(missing_ok=True)
    os.sync()
    handle = op.aio_handle(BLOCK_BYTES, queue_depth, False, True, 1)
    piece_bytes = n_bytes // PIECES
    tensor = handle.new_cpu_locked_tensor(piece_bytes, torch.empty(0, dtype=torch.uint8))
    tensor.random_(0, 255)
    rates = []
    for submit in (handle.async_pwrite, handle.async_pread):
        began_s = time.perf_counter()
        for piece in range(PIECES):
            submit(tensor, str(path), piece * piece_bytes)
        handle.wait()
        rates.append(n_bytes / (time.perf_counter() - began_s) / GB)
        os.sync()
    handle.free_cpu_locked_tensor(tensor)
    return rates


def fio(path: Path, n_bytes: int, way: str, queue_depth: int) -> float:
    """GB/s; 0 where fio is not installed."""
    if shutil.which("fio") is None:
        return 0.0
    options = {"name": way, "filename": path, "size": n_bytes, "rw": way, "bs": BLOCK_BYTES, "iodepth": queue_depth}
    command = ["fio", "--direct=1", "--ioengine=io_uring", "--output-format=json"]
    command += [f"--{name}={value}" for name, value in options.items()]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(printed)["jobs"][0][way]["bw_bytes"]) / GB


# The base compiles its two ops for minutes.
CASE = Case(title="I/O op", measure=measure, world_sizes=(1,), time_limit_s=1500.0)
