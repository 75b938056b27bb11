"""Pinned host memory: whole pages, locked where the limit allows it, and known to everybody in this process."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Optional

import torch
from deepspeed.utils import logger

from .library import PagesLibrary
from .once import is_first_time

RAISING_THE_LIMIT = "`ulimit -l`, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for a container"
_CAP_IPC_LOCK = 14  # of linux/capability.h


@dataclass(frozen=True)
class _Region:
    """One allocation: whole pages."""

    address: int
    n_bytes: int
    library: PagesLibrary
    is_registered: bool


class PinnedMemory:
    """The pinned regions of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the end of a tensor may come in the middle of a call
        self._regions: Dict[int, _Region] = {}

    def allocate(
        self,
        library: PagesLibrary,
        numel: int,
        dtype: torch.dtype,
        *,
        must_lock: bool = False,
        register_device: bool = False,
    ) -> torch.Tensor:
        """A flat tensor on pages of its own, which last as long as it and its views do.

        Beyond the limit for locked memory it stays unlocked, which one line in the log tells, or with `must_lock`
        raises OSError. `register_device` makes it known to CUDA, if CUDA is in use already: not run on a GPU yet.
        """
        n_bytes = numel * torch.empty(0, dtype=dtype).element_size()
        if n_bytes == 0:
            return torch.empty(0, dtype=dtype)
        address, lock_error = library.map_pages(n_bytes)
        if lock_error != 0:
            if must_lock:
                library.unmap_pages(address, n_bytes)
                raise OSError(lock_error, _about_the_limit(n_bytes, lock_error))
            if is_first_time("memory that is not locked"):
                logger.warning("%s. Going on with memory that is not locked", _about_the_limit(n_bytes, lock_error))
        region = _Region(address, n_bytes, library, register_device and _register(address, n_bytes))
        pages = (ctypes.c_char * n_bytes).from_address(address)
        with self._lock:
            self._regions[address] = region
        # torch holds on to this object for as long as there is a tensor on it. At exit the system takes the pages
        # back, from under whatever still runs.
        weakref.finalize(pages, self._unmap, region).atexit = False
        return torch.frombuffer(pages, dtype=dtype, count=numel)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the whole of a tensor lies in one pinned region."""
        if tensor.device.type != "cpu":
            return False
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        with self._lock:
            return any(r.address <= begin and end <= r.address + r.n_bytes for r in self._regions.values())

    def free(self, address: int) -> bool:
        """Give the pages of the region that begins here back to the system; False if there is no such region.

        A tensor that is still on them does no harm: it is no longer pinned, and reads zeros.
        """
        with self._lock:
            region = self._regions.pop(address, None)
        if region is None:
            return False
        _unregister(region)
        region.library.empty_pages(region.address, region.n_bytes)
        return True

    def _unmap(self, region: _Region) -> None:
        with self._lock:
            was_freed = self._regions.pop(region.address, None) is None
        if not was_freed:
            _unregister(region)
        region.library.unmap_pages(region.address, region.n_bytes)


# Pinned pages are the process's, whichever handle asked for them.
PINNED = PinnedMemory()


def locked_limit_bytes() -> Optional[int]:
    """How much memory an unprivileged process may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def lockable_bytes() -> Optional[int]:
    """How much more memory this process may lock; None without a limit, or for a process that none applies to."""
    limit_bytes = locked_limit_bytes()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if limit_bytes is None or int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1:
        return None
    return max(0, limit_bytes - int(status["VmLck"].split()[0]) * 1024)


def _about_the_limit(n_bytes: int, lock_error: int) -> str:
    limit_bytes = locked_limit_bytes()
    limit = "there is no limit (RLIMIT_MEMLOCK)" if limit_bytes is None else f"the limit is {limit_bytes} bytes"
    return (
        f"cannot lock {n_bytes} bytes of memory ({os.strerror(lock_error)}): {limit}. To raise it: {RAISING_THE_LIMIT}"
    )


def _register(address: int, n_bytes: int) -> bool:
    """Not run on a GPU yet."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    error = torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0)
    if int(error) != 0:
        logger.warning("CUDA does not take %d bytes of pinned memory (error %d); copies are slower", n_bytes, error)
    return int(error) == 0


def _unregister(region: _Region) -> None:
    if region.is_registered:
        torch.cuda.cudart().cudaHostUnregister(region.address)
