"""Memory for what comes from disk: whole pages, huge ones where the system has them, used again once they are free.

A read into fresh memory waits while the kernel finds and clears its pages, and a read into small pages is cut into
many pieces by the disk's driver. The pages of a parameter that was released are there already, and of the right size.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch

PAGE_BYTES = 4096
"""What direct I/O wants addresses, offsets and lengths to be multiples of."""
HUGE_PAGE_BYTES = 2 * 2**20


def aligned_bytes(n_bytes: int) -> torch.Tensor:
    """A uint8 vector on the host that begins at a page, as direct I/O wants it, on pages of its own."""
    return _vector(_pages_of(_Region.map(n_bytes)), n_bytes) if n_bytes else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class _Region:
    """Whole pages of anonymous memory: ``n_bytes`` of ``mapping``, from ``start`` on."""

    mapping: mmap.mmap
    start: int
    n_bytes: int

    @staticmethod
    def map(n_bytes: int) -> _Region:
        n_bytes = _whole_pages(n_bytes)
        # More is mapped than is wanted, so that a huge page can begin where the region does. It is never touched.
        slack_bytes = HUGE_PAGE_BYTES if n_bytes >= HUGE_PAGE_BYTES else 0
        mapping = mmap.mmap(-1, n_bytes + slack_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = 0
        if slack_bytes:
            start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
            # Not the rest: a huge page there would take memory that nobody asked for.
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE, start, n_bytes - n_bytes % HUGE_PAGE_BYTES)
        return _Region(mapping, start, n_bytes)


@dataclass
class PageStock:
    """Hands out memory, and takes it back when no tensor is on it any more. Thread-safe.

    What somebody still refers to, through whichever view, is not free. So a parameter's values stay right for whoever
    kept them when the parameter was released.

    Args:
        idle_limit_bytes: how much may lie idle. Beyond it, what has been idle longest goes back to the system.
    """

    idle_limit_bytes: int
    idle_bytes: int = 0
    reused: int = 0
    """How often memory was used again."""
    mapped: int = 0
    """How often it was new."""
    _idle: deque[_Region] = field(default_factory=deque)
    """Those that became idle last are last."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """The end of a tensor may come in the middle of a call."""

    def empty(self, n_bytes: int) -> torch.Tensor:
        """A uint8 vector that begins at a page, with whatever is in it."""
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        region = self._take(_whole_pages(n_bytes))
        pages = _pages_of(region)
        # torch holds on to this object for as long as there is a tensor on it.
        weakref.finalize(pages, self._give_back, region).atexit = False
        return _vector(pages, n_bytes)

    def close(self) -> None:
        """Keep nothing from now on. What is in use stays good."""
        with self._lock:
            self.idle_limit_bytes = 0
            self._trim()

    def _take(self, n_bytes: int) -> _Region:
        with self._lock:
            for region in reversed(self._idle):
                if region.n_bytes == n_bytes:
                    self._idle.remove(region)
                    self.idle_bytes -= n_bytes
                    self.reused += 1
                    return region
            self.mapped += 1
        return _Region.map(n_bytes)

    def _give_back(self, region: _Region) -> None:
        with self._lock:
            self._idle.append(region)
            self.idle_bytes += region.n_bytes
            self._trim()

    def _trim(self) -> None:
        while self.idle_bytes > self.idle_limit_bytes:
            self.idle_bytes -= self._idle.popleft().n_bytes


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


def _pages_of(region: _Region) -> ctypes.Array[ctypes.c_char]:
    """A new object on the memory of ``region``, which it keeps."""
    return (ctypes.c_char * region.n_bytes).from_buffer(region.mapping, region.start)


def _vector(pages: ctypes.Array[ctypes.c_char], n_bytes: int) -> torch.Tensor:
    return torch.frombuffer(pages, dtype=torch.uint8, count=n_bytes)
