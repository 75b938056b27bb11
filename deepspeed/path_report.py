"""Which of the fork's paths work on this machine, each tried and not guessed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder


@dataclass(frozen=True)
class PathReport:
    """One line of the report."""

    name: str
    works: bool
    detail: str


def reports() -> Iterator[PathReport]:
    """Takes some seconds the first time: the I/O op is compiled."""
    for name, look in _LOOKS.items():
        try:
            yield PathReport(name, True, look())
        except Exception as error:  # whatever is wrong is what the report is for
            yield PathReport(name, False, (str(error).strip() or type(error).__name__).splitlines()[0])


def _engine() -> str:
    with _open_engine() as engine, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tried"
        written = torch.arange(4096, dtype=torch.uint8)
        read = torch.empty_like(written)
        engine.submit_write(path, written).wait()
        engine.submit_read(path, read).wait()
        if not torch.equal(written, read):
            raise OSError(errno.EIO, "what was read is not what was written")
    return "NVMe offload"


def _io_uring() -> str:
    with _open_engine(backend="io_uring"):
        return "the kernel allows it"


def _direct() -> str:
    folder = tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    return f"tried in {folder}; each file system allows it or not"


def _shared_memory() -> str:
    descriptor = os.memfd_create("deepspeed-report", os.MFD_CLOEXEC)
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
    finally:
        os.close(descriptor)
    return "nameless, opened through /proc; its size is limited by memory alone"


def _named_memory() -> str:
    usage = shutil.disk_usage("/dev/shm")
    return f"/dev/shm has {usage.total:,} bytes, {usage.free:,} free; used where nameless memory cannot be opened"


def _gpu() -> str:
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees none")
    return f"{torch.cuda.device_count()} seen; what the fork does there has never been run"


def _open_engine(backend: str | None = None):  # type: ignore[no-untyped-def]  # the op is typed where it is built
    return AsyncIOBuilder().load(verbose=False).engine(backend=backend)


_LOOKS: dict[str, Callable[[], str]] = {
    "I/O engine": _engine,
    "io_uring": _io_uring,
    "O_DIRECT": _direct,
    "shared memory": _shared_memory,
    "/dev/shm": _named_memory,
    "GPU": _gpu,
}
