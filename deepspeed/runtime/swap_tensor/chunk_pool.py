"""A few equal pieces of page-locked memory through which data of any size moves between disk and memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Optional, Protocol
from weakref import WeakKeyDictionary

import psutil
import torch
from deepspeed.ops.aio.pinned import RAISING_THE_LIMIT
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES, aligned_bytes


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a partition, and of its file."""

    offset_bytes: int
    n_bytes: int


def extents_of(n_bytes: int, chunk_bytes: int) -> Iterator[Extent]:
    """Cut ``n_bytes`` into extents of at most ``chunk_bytes``, first to last."""
    for offset_bytes in range(0, n_bytes, chunk_bytes):
        yield Extent(offset_bytes, min(chunk_bytes, n_bytes - offset_bytes))


def fitting_pool(chunk_bytes: int, count: int, least_chunk_bytes: int, limit_bytes: int) -> tuple[int, int]:
    """The size of chunks, and how many, of which no more is allocated than ``limit_bytes``.

    Smaller chunks before fewer; but one of ``least_chunk_bytes`` whatever the limit.
    """
    chunk_bytes = min(chunk_bytes, max(limit_bytes // count, least_chunk_bytes))
    chunk_bytes -= chunk_bytes % PAGE_BYTES
    return chunk_bytes, max(1, min(count, limit_bytes // chunk_bytes))


class Event(Protocol):
    """What a device is doing, as `torch.cuda.Event` tells it."""

    def query(self) -> bool:
        """Whether it is done."""

    def synchronize(self) -> None:
        """Return when it is done."""


class Job(Protocol):
    """One use of a chunk."""

    def start(self, chunk: torch.Tensor) -> None:
        """Begin what needs ``chunk``, and return."""

    def finish(self) -> Optional[Event]:
        """Wait for it. The chunk is free when this raises, when it returns None, or else after the event."""


class NoMemoryForChunks(RuntimeError):
    """The pool does not fit into this machine's memory, or into what may be locked of it."""


@dataclass
class ChunkPool:
    """Chunks, allocated when the first is needed. Not thread-safe.

    Who needs a chunk while none is free first finishes the oldest job, whosever it is. So what is needed now never
    waits for anything but the disk, however many chunks those who read ahead have taken. A chunk whose data a device is
    still copying is free when that is done; meanwhile the disk fills the others.

    Args:
        chunk_bytes: a multiple of `PAGE_BYTES`.
        count: how many there are.
        allocate: makes an uninitialised uint8 vector that begins at a page, page-locked if that is wanted.
        lockable_bytes: tells how much this process may lock, if ``allocate`` locks; None without a limit.
    """

    chunk_bytes: int
    count: int
    allocate: Callable[[int], torch.Tensor] = aligned_bytes
    lockable_bytes: Callable[[], Optional[int]] = lambda: None
    _free: Optional[list[torch.Tensor]] = None
    _busy: deque[tuple[Job, torch.Tensor]] = field(default_factory=deque)
    _draining: deque[tuple[Event, torch.Tensor]] = field(default_factory=deque)
    """Jobs are finished, but the device still copies."""
    _failures: WeakKeyDictionary[Job, BaseException] = field(default_factory=WeakKeyDictionary)
    """Of jobs that were finished for the sake of another, for those who wait for them."""

    def __post_init__(self) -> None:
        if self.chunk_bytes <= 0 or self.chunk_bytes % PAGE_BYTES or self.count <= 0:
            raise ValueError(
                f"expected chunks of a positive multiple of {PAGE_BYTES} bytes, and at least one; got {self.count} of "
                f"{self.chunk_bytes}"
            )

    @property
    def n_bytes(self) -> int:
        """What the pool takes once it is allocated."""
        return self.chunk_bytes * self.count

    @property
    def is_idle(self) -> bool:
        return not self._busy and not self._draining

    def try_start(self, job: Job) -> bool:
        """Start ``job`` if a chunk is free."""
        free = self._chunks()
        while self._draining and self._draining[0][0].query():
            self._drain_oldest()
        if not free:
            return False
        chunk = free.pop()
        try:
            job.start(chunk)
        except BaseException:
            free.append(chunk)
            raise
        self._busy.append((job, chunk))
        return True

    def start(self, job: Job) -> None:
        """Start ``job``. If no chunk is free, finishes the oldest job first; what that raises is kept for its owner."""
        while not self.try_start(job):
            if not self._busy:
                self._drain_oldest()
                continue
            oldest, _ = self._busy[0]
            try:
                self._finish_at(0)
            except Exception as error:
                self._failures[oldest] = error

    def finish(self, job: Job) -> None:
        """Finish ``job`` if that has not happened yet. Raises what it raised."""
        failure = self._failures.pop(job, None)
        if failure is not None:
            raise failure
        for position, (busy, _) in enumerate(self._busy):
            if busy is job:
                self._finish_at(position)
                return

    def _finish_at(self, position: int) -> None:
        job, chunk = self._busy[position]
        del self._busy[position]
        event: Optional[Event] = None
        try:
            event = job.finish()
        finally:
            if event is None:
                self._chunks().append(chunk)
            else:
                self._draining.append((event, chunk))

    def _drain_oldest(self) -> None:
        event, chunk = self._draining.popleft()
        event.synchronize()
        self._chunks().append(chunk)

    def _chunks(self) -> list[torch.Tensor]:
        if self._free is None:
            self._check_memory()
            room = self.allocate(self.n_bytes)
            self._free = list(room.split(self.chunk_bytes))
        return self._free

    def _check_memory(self) -> None:
        needed = (
            f"{self.count} chunks of {self.chunk_bytes:,} bytes ({self.n_bytes:,} in all) are needed to move "
            "parameters between disk and memory"
        )
        available_bytes = psutil.virtual_memory().available
        if self.n_bytes > available_bytes:
            raise NoMemoryForChunks(
                f"{needed}, but only {available_bytes:,} bytes of host memory are available: lower "
                "offload_param.buffer_count or offload_param.buffer_size"
            )
        lockable_bytes = self.lockable_bytes()
        if lockable_bytes is not None and self.n_bytes > lockable_bytes:
            raise NoMemoryForChunks(
                f"{needed} and have to stay in memory, but this process may lock only {lockable_bytes:,} bytes more "
                f"(RLIMIT_MEMLOCK). Raise the limit ({RAISING_THE_LIMIT}), or set offload_param.pin_memory to false"
            )
