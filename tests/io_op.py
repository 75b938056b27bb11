"""The I/O op for tests: its backends, plain file I/O to compare with, and memory of every kind of alignment."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

BACKENDS = ("io_uring", "threads")


@functools.lru_cache(maxsize=1)
def io_op() -> Any:
    """The op, compiled at the first call."""
    builder = pytest.importorskip("deepspeed.ops.op_builder").AsyncIOBuilder()
    if not builder.is_compatible():
        pytest.skip("the I/O op needs Linux and a C++ compiler")
    return builder.load()


def require_backend(backend: str) -> str:
    try:
        io_op().engine(backend=backend).close()
    except OSError as error:
        pytest.skip(f"no {backend} here: {error}")
    return backend


def some_bytes(n_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def memory(n_bytes: int, misaligned_by: int | None = None) -> torch.Tensor:
    """Pinned memory, which devices take as it is; or memory that begins this many bytes after such an address."""
    if misaligned_by is None:
        return io_op().pinned_empty(n_bytes, torch.uint8)
    return io_op().pinned_empty(n_bytes + misaligned_by, torch.uint8)[misaligned_by:]


def stored(path: Path, offset: int = 0, n_bytes: int = -1) -> torch.Tensor:
    """What plain file I/O reads."""
    with path.open("rb") as file:
        file.seek(offset)
        content = bytearray(file.read(n_bytes))
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
