"""The C++ libraries of the I/O op and of pinned memory as Python sees them: their functions, and errno as exceptions.

Declares what `csrc/aio/engine/api.cpp` and `csrc/pin_memory/pages.cpp` define. ctypes gives up the interpreter's lock
around every call.
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

_STILL_RUNNING = -errno.ETIME
_FOREIGN_PROCESS = -errno.ECHILD


class ForkedHandleError(RuntimeError):
    """A handle was used in a process that is not the one which made it. It is untouched, and works on over there."""

    def __init__(self) -> None:
        super().__init__(
            f"process {os.getpid()} has inherited this I/O handle from the process that forked it, and cannot use it: "
            "its threads are in the other process. Make a handle after the fork"
        )


class FileFacts(ctypes.Structure):
    """How a file can be reached."""

    _fields_ = [
        ("device", c_uint64),
        ("is_direct", c_uint32),
        ("is_in_memory", c_uint32),
        ("is_regular", c_uint32),
        ("memory_alignment_bytes", c_uint32),
        ("offset_alignment_bytes", c_uint32),
    ]


class _Result(ctypes.Structure):
    _fields_ = [("n_done_bytes", c_uint64), ("error_offset", c_uint64), ("error", c_int32), ("fell_back", c_uint32)]


_STATS = (
    "n_threads",
    "n_in_flight_requests",
    "n_completions",
    "direct_bytes",
    "bounced_bytes",
    "buffered_bytes",
    "most_blocks_at_once",
    "is_ring",
)


class _Stats(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in _STATS]


@dataclass(frozen=True)
class Outcome:
    """What became of a transfer. `error` is the errno of its first failure, or 0."""

    n_done_bytes: int
    error: int
    error_offset: int
    fell_back: bool


@dataclass(frozen=True)
class EngineStats:
    """What an engine is and has done since it was made."""

    backend: str
    n_threads: int
    n_in_flight_requests: int
    n_completions: int
    direct_bytes: int
    bounced_bytes: int
    buffered_bytes: int
    most_blocks_at_once: int


def raise_errno(code: int, filename: Optional[str] = None) -> None:
    """Raise the exception for a result of the library that is not 0."""
    if code == _FOREIGN_PROCESS:
        raise ForkedHandleError
    if code != 0:
        raise OSError(-code, os.strerror(-code), filename)


class PagesLibrary:
    """Pages of memory; part of both libraries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.ds_pages_map.argtypes = [c_uint64, POINTER(c_void_p), POINTER(c_int32)]
        for name in ("ds_pages_empty", "ds_pages_unmap"):
            getattr(self._library, name).argtypes = [c_void_p, c_uint64]

    def map_pages(self, n_bytes: int) -> tuple[int, int]:
        """The address of new pages, and 0 or the errno with which locking them failed."""
        address, lock_error = c_void_p(), c_int32()
        raise_errno(self._library.ds_pages_map(n_bytes, byref(address), byref(lock_error)))
        return int(address.value or 0), lock_error.value

    def empty_pages(self, address: int, n_bytes: int) -> None:
        raise_errno(self._library.ds_pages_empty(address, n_bytes))

    def unmap_pages(self, address: int, n_bytes: int) -> None:
        raise_errno(self._library.ds_pages_unmap(address, n_bytes))


class AioLibrary(PagesLibrary):
    """The I/O engine. Pointers to engines and files are plain integers here; `engine.py` owns them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        prototypes = {
            "ds_aio_file_open": [c_char_p, c_int, POINTER(c_void_p), POINTER(FileFacts)],
            "ds_aio_file_adopt": [c_int, POINTER(c_void_p), POINTER(FileFacts)],
            "ds_aio_file_close": [c_void_p],
            "ds_aio_engine_open": [c_uint64, c_uint32, c_uint32, c_int, POINTER(c_void_p)],
            "ds_aio_engine_stop": [c_void_p],
            "ds_aio_engine_close": [c_void_p],
            "ds_aio_submit": [c_void_p, c_void_p, c_int, c_uint64, c_void_p, c_uint64, POINTER(c_uint64)],
            "ds_aio_wait": [c_void_p, c_uint64, c_int64, POINTER(_Result)],
            "ds_aio_forget": [c_void_p, c_uint64],
            "ds_aio_engine_stats": [c_void_p, POINTER(_Stats)],
            "ds_aio_test_inject": [c_void_p, c_uint64, c_int],
            "ds_aio_test_hold": [c_void_p, c_int],
        }
        for name, argument_types in prototypes.items():
            getattr(self._library, name).argtypes = argument_types
        self._library.ds_aio_file_close.restype = None

    def open_file(self, path: str, mode: int) -> tuple[int, FileFacts]:
        file, facts = c_void_p(), FileFacts()
        raise_errno(self._library.ds_aio_file_open(os.fsencode(path), mode, byref(file), byref(facts)), path)
        return int(file.value or 0), facts

    def adopt_file(self, descriptor: int) -> tuple[int, FileFacts]:
        file, facts = c_void_p(), FileFacts()
        raise_errno(self._library.ds_aio_file_adopt(descriptor, byref(file), byref(facts)), f"fd {descriptor}")
        return int(file.value or 0), facts

    def close_file(self, file: int) -> None:
        self._library.ds_aio_file_close(file)

    def open_engine(self, block_bytes: int, queue_depth: int, n_threads: int, backend: int) -> int:
        engine = c_void_p()
        raise_errno(self._library.ds_aio_engine_open(block_bytes, queue_depth, n_threads, backend, byref(engine)))
        return int(engine.value or 0)

    def stop_engine(self, engine: int) -> None:
        """Waits for what is in flight and ends the threads; outcomes can still be asked for."""
        self._library.ds_aio_engine_stop(engine)

    def close_engine(self, engine: int) -> None:
        """Waits for what is in flight. Does nothing in a process that has only inherited the engine."""
        self._library.ds_aio_engine_close(engine)

    def submit(self, engine: int, file: int, is_write: bool, offset: int, address: int, n_bytes: int) -> int:
        request_id = c_uint64()
        raise_errno(self._library.ds_aio_submit(engine, file, is_write, offset, address, n_bytes, byref(request_id)))
        return request_id.value

    def wait(self, engine: int, request_id: int, timeout_s: float) -> Optional[Outcome]:
        """The outcome, for as long as it is not forgotten; None if the time is over."""
        result = _Result()
        code = self._library.ds_aio_wait(engine, request_id, int(timeout_s * 1e9), byref(result))
        if code == _STILL_RUNNING:
            return None
        raise_errno(code)
        return Outcome(result.n_done_bytes, result.error, result.error_offset, bool(result.fell_back))

    def forget(self, engine: int, request_id: int) -> None:
        self._library.ds_aio_forget(engine, request_id)

    def stats(self, engine: int) -> EngineStats:
        stats = _Stats()
        raise_errno(self._library.ds_aio_engine_stats(engine, byref(stats)))
        counts = {name: getattr(stats, name) for name in _STATS if name != "is_ring"}
        return EngineStats(backend="io_uring" if stats.is_ring else "threads", **counts)

    def inject(self, engine: int, nth_completion: int, result: int) -> None:
        raise_errno(self._library.ds_aio_test_inject(engine, nth_completion, result))

    def hold(self, engine: int, is_held: bool) -> None:
        raise_errno(self._library.ds_aio_test_hold(engine, is_held))
