"""Giving memory that was freed back to the system.

glibc keeps large blocks that were freed between small ones that live, and its aligned allocations, which torch makes,
do not find them again (before glibc 2.38: https://sourceware.org/bugzilla/show_bug.cgi?id=14581). A model that goes to
disk parameter by parameter while it is built would leave a process as large as if it had stayed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

TRIM_AFTER_BYTES = 16 * 2**20
"""Takes some milliseconds, so not after every parameter."""


@dataclass
class HeapTrimmer:
    """Trims the heap of the C library each time that this much has gone from memory. Nothing without glibc."""

    after_bytes: int = TRIM_AFTER_BYTES
    freed_bytes: int = 0

    def __post_init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def freed(self, n_bytes: int) -> None:
        """``n_bytes`` were freed."""
        self.freed_bytes += n_bytes
        if self.freed_bytes >= self.after_bytes and self._trim is not None:
            self.freed_bytes = 0
            self._trim(0)
