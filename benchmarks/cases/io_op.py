"""How fast the I/O op moves pinned memory to and from a file, past the page cache, against fio on the same file system.

The base compiles its ops for minutes, once: a later run finds them in the folder of its environment.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks import disk
from benchmarks.case import Case, Rank
from benchmarks.figure import Better, Figure

QUEUE_DEPTHS = (8, 32)
PIECES = 8


def measure(rank: Rank) -> list[Figure]:
    """Medians of rounds in which fio and the op take turns. The file is new for every write."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    compiled_before = any(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("async_io/*.so"))
    began_s = time.perf_counter()
    op = AsyncIOBuilder().load()
    load_s = time.perf_counter() - began_s
    n_bytes = rank.choose(full=1 << 30, quick=1 << 26)
    path = rank.scratch_dir / "file"
    op_rates, fio_rates = [], []
    for _ in range(rank.choose(full=3, quick=1)):
        fio_rates.append([disk.best_write_rate(path, n_bytes), disk.best_read_rate(path, n_bytes)])
        op_rates.append([max(pair) for pair in zip(*(write_and_read(op, path, n_bytes, d) for d in QUEUE_DEPTHS))])
    figures = [Figure(f"loading async_io, {'compiled before' if compiled_before else 'compiling it'}", load_s, "s")]
    for index, way in enumerate(("write", "read")):
        rate, fio_rate = (sorted(round_[index] for round_ in rates)[len(rates) // 2] for rates in (op_rates, fio_rates))
        figures.append(Figure(f"I/O op, {way}", rate, "GB/s", Better.HIGHER))
        figures.append(Figure(f"I/O op, {way} / fio's best", rate / fio_rate, "× fio", Better.HIGHER))
    return figures


def write_and_read(op: Any, path: Path, n_bytes: int, queue_depth: int) -> list[float]:
    """GB/s of a write to a new file, and of a read of it."""
    import torch

    path.unlink(missing_ok=True)
    os.sync()
    handle = op.aio_handle(disk.BLOCK_BYTES, queue_depth, False, True, 1)
    piece_bytes = n_bytes // PIECES
    tensor = handle.new_cpu_locked_tensor(piece_bytes, torch.empty(0, dtype=torch.uint8))
    tensor.random_(0, 255)
    rates = []
    for submit in (handle.async_pwrite, handle.async_pread):
        began_s = time.perf_counter()
        for piece in range(PIECES):
            submit(tensor, str(path), piece * piece_bytes)
        handle.wait()
        rates.append(n_bytes / (time.perf_counter() - began_s) / disk.GB)
        os.sync()
    handle.free_cpu_locked_tensor(tensor)
    return rates


# The base compiles its two ops for minutes.
CASE = Case(title="I/O op", measure=measure, world_sizes=(1,), time_limit_s=1500.0)
