"""Memory that the ranks of one machine share, and that goes with the last of them.

[Note: how a segment is shared]

Rank 0 makes a file in memory that has no name (memfd_create(2)), and the others open it through ``/proc/<pid>/fd``. So
there is nothing that a killed process could leave behind, and the size of /dev/shm does not matter. Where /proc of
another process cannot be opened, a file with a name is used, in /dev/shm or, if that is too small, in the folder for
temporary files; the name is removed as soon as all ranks have it open. Each rank compares a random token, so that
a file that has the right name in another container is not taken for it.

Each rank holds a lock on a byte of the file. The system drops it when the process ends, however it ends, so the others
can tell.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Protocol

import torch

LINE_BYTES = 64
"""One cache line for each rank's counters, so that ranks do not slow each other."""
PAGE_BYTES = 4096
TOKEN_BYTES = 16
NAME_PREFIX = "deepspeed-zero3-"

Exchange = Callable[[Any], list[Any]]
"""Gives each rank's object to all ranks, in rank order. Objects are small."""


class Counter(enum.IntEnum):
    """What each rank counts for the others to see."""

    PROGRESS = 0
    """Anything that shows that it is getting on."""
    ARRIVALS = 1
    """Meetings that it has come to."""


class SegmentUnavailable(RuntimeError):
    """The ranks have no memory that all of them can open. Raised on all of them; the text says why."""


class Place(Protocol):
    """Where a segment can be."""

    def make(self, n_bytes: int) -> int:
        """A descriptor of a new file of that size. Raises OSError."""

    @property
    def address(self) -> str:
        """By which other processes open it."""

    def remove_name(self) -> None:
        """All have it open."""


@dataclass
class Nameless:
    """A file in memory that only its descriptors lead to."""

    address: str = ""

    def make(self, n_bytes: int) -> int:
        descriptor = os.memfd_create("deepspeed-zero3", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, n_bytes)
        except OSError:
            os.close(descriptor)
            raise
        self.address = f"/proc/{os.getpid()}/fd/{descriptor}"
        return descriptor

    def remove_name(self) -> None:
        """It has none."""


@dataclass
class Named:
    """A file in ``folder``, which is removed again at once."""

    folder: Path
    address: str = ""

    def make(self, n_bytes: int) -> int:
        remove_leftovers(self.folder)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < n_bytes:
            raise OSError(0, f"{n_bytes:,} bytes are needed, {free_bytes:,} are free", str(self.folder))
        descriptor, self.address = tempfile.mkstemp(prefix=NAME_PREFIX, dir=self.folder)
        try:
            # By this others know that it is not left over.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Blocks that are missing would show as SIGBUS, when they are written.
            os.posix_fallocate(descriptor, 0, n_bytes)
        except OSError:
            os.close(descriptor)
            self.remove_name()
            raise
        return descriptor

    def remove_name(self) -> None:
        if self.address:
            Path(self.address).unlink(missing_ok=True)


def default_places() -> tuple[Place, ...]:
    """Best first."""
    return Nameless(), Named(Path("/dev/shm")), Named(Path(tempfile.gettempdir()))


def remove_leftovers(folder: Path) -> None:
    """Delete files of ranks that were killed before all had opened them."""
    for path in folder.glob(f"{NAME_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


class NodeSegment:
    """Shared memory, as this rank sees it. It is unmapped when nothing refers to `memory` any more.

    Args:
        descriptor: of a file of ``n_bytes`` and what `file_bytes` adds. Belongs to this object from now on.
        rank, ranks: this rank's place among those that share it, and how many there are.
    """

    def __init__(self, descriptor: int, n_bytes: int, rank: int, ranks: int) -> None:
        self._descriptor = descriptor
        self.rank = rank
        mapping = mmap.mmap(descriptor, file_bytes(n_bytes, ranks))
        start = _header_bytes(ranks)
        self.token = mapping[:TOKEN_BYTES]
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)[start : start + n_bytes]
        """``(n_bytes,)`` uint8; the same bytes on all ranks."""
        self._counters = memoryview(mapping)[:start].cast("q")
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def count(self, counter: Counter) -> int:
        """Add one to a counter of this rank; returns what it is then."""
        place = _place_of(self.rank, counter)
        self._counters[place] = value = self._counters[place] + 1
        return value

    def set(self, counter: Counter, value: int) -> None:
        """Have a counter of this rank go on from ``value``."""
        self._counters[_place_of(self.rank, counter)] = value

    def counted(self, rank: int, counter: Counter) -> int:
        """What ``rank`` has counted so far."""
        return self._counters[_place_of(rank, counter)]

    def is_alive(self, rank: int) -> bool:
        """Whether the process of ``rank`` has not ended and not closed its segment."""
        if rank == self.rank:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return False

    def close(self) -> None:
        """Leave. Tensors of `memory` stay valid. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def share(
    n_bytes: int, rank: int, ranks: int, exchange: Exchange, places: Optional[Sequence[Place]] = None
) -> NodeSegment:
    """A segment of ``n_bytes`` zero bytes. A collective of the ranks that ``exchange`` connects.

    Raises:
        SegmentUnavailable: the ranks are on several machines, or nothing that one makes can be opened by all.
    """
    reasons = []
    for place in places if places is not None else default_places():
        segment, reason = _try(place, n_bytes, rank, ranks, exchange)
        if segment is not None:
            return segment
        reasons.append(reason)
    raise SegmentUnavailable(f"no memory of {n_bytes:,} bytes can be shared: {'; '.join(reasons)}")


def _try(place: Place, n_bytes: int, rank: int, ranks: int, exchange: Exchange) -> tuple[Optional[NodeSegment], str]:
    segment: Optional[NodeSegment] = None
    offer, problem = ("", b""), ""
    try:
        if rank == 0:
            try:
                segment, token = _make(place, n_bytes, ranks)
                offer = (place.address, token)
            except OSError as error:
                problem = str(error)
        address, token = exchange(offer)[0]
        if rank != 0 and address:
            try:
                segment = NodeSegment(os.open(address, os.O_RDWR | os.O_CLOEXEC), n_bytes, rank, ranks)
                if segment.token != token:
                    problem = f"{address} is another file there"
            except (OSError, ValueError) as error:
                problem = str(error)
        # All hold their locks when this returns.
        problems = [f"rank {n}: {text}" for n, text in enumerate(exchange(problem)) if text]
    finally:
        if rank == 0:
            place.remove_name()
    if problems:
        return None, ", ".join(problems)
    return segment, ""


def _make(place: Place, n_bytes: int, ranks: int) -> tuple[NodeSegment, bytes]:
    descriptor = place.make(file_bytes(n_bytes, ranks))
    token = secrets.token_bytes(TOKEN_BYTES)
    os.pwrite(descriptor, token, 0)
    return NodeSegment(descriptor, n_bytes, 0, ranks), token


def file_bytes(n_bytes: int, ranks: int) -> int:
    """The size of the file of a segment of ``n_bytes``."""
    return _header_bytes(ranks) + n_bytes


def _header_bytes(ranks: int) -> int:
    return -(-(1 + ranks) * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES


def _place_of(rank: int, counter: Counter) -> int:
    return (1 + rank) * LINE_BYTES // 8 + counter
