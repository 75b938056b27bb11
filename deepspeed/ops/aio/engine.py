"""Transfers between files and memory: one request each, with a result and an error of its own.

Meant for code that schedules its own I/O; the interface of DeepSpeed's op is in `handle.py`.

    with op.engine(queue_depth=32) as engine, engine.open(path, "r") as file:
        request = engine.submit_read(file, tensor, file_offset=4096)
        ...
        request.wait()
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import weakref
from enum import IntEnum
from types import TracebackType
from typing import Any, Dict, List, Optional, Tuple, Type, Union

import torch
from deepspeed.utils import logger

from .library import AioLibrary, EngineStats, ForkedHandleError, Outcome
from .once import is_first_time

BACKEND_VARIABLE = "DS_AIO_BACKEND"
# A thread that waits looks up this often, so that Ctrl-C is heard.
_SLICE_S = 0.5
_MOST_FILE_BYTES = 2**63 - 1
_MOST_BLOCK_BYTES = 2**30  # the kernel cuts longer transfers short
_MOST_QUEUE_DEPTH = 4096

FilePath = Union[str, "os.PathLike[str]"]
Memory = Union[torch.Tensor, Tuple[int, int]]  # a tensor, or an address and a number of bytes


class Backend(IntEnum):
    """How blocks get to the kernel."""

    AUTO = 0
    IO_URING = 1
    THREADS = 2

    @classmethod
    def named(cls, name: Optional[str]) -> Backend:
        """By name, or as the environment says; else io_uring where the kernel allows it."""
        wanted = name or os.environ.get(BACKEND_VARIABLE) or "auto"
        try:
            return cls[wanted.upper()]
        except KeyError:
            names = ", ".join(backend.name.lower() for backend in cls)
            raise ValueError(f"{BACKEND_VARIABLE}: expected one of {names}, got {wanted!r}") from None


class AsyncIOError(OSError):
    """A transfer that failed. The memory of a failed read, and the range of a failed write, hold old and new mixed."""

    def __init__(
        self,
        code: int,
        operation: str,
        filename: str,
        offset: int,
        wanted_bytes: int,
        got_bytes: int,
        failed_offset: int,
    ) -> None:
        reason = "end of file" if code == errno.ENODATA and operation == "read" else os.strerror(code)
        super().__init__(code, reason)
        self._facts = (code, operation, filename, offset, wanted_bytes, got_bytes, failed_offset)
        self.operation = operation
        self.filename = filename
        self.offset = offset
        self.wanted_bytes = wanted_bytes
        self.got_bytes = got_bytes
        self.failed_offset = failed_offset
        self.also_failed: Tuple[OSError, ...] = ()  # other requests that one wait() found failed

    def __str__(self) -> str:
        others = f" ({len(self.also_failed)} more requests failed)" if self.also_failed else ""
        return (
            f"{self.operation} of {self.filename}, offset {self.offset}: wanted {self.wanted_bytes} bytes, got "
            f"{self.got_bytes}; at offset {self.failed_offset}: [Errno {self.errno}] {self.strerror}{others}"
        )

    def __reduce__(self) -> Any:
        return type(self), self._facts


class IOFile:
    """A file open for requests: past the page cache where its file system allows that, and through it for the rest."""

    _MODES = {"r": 0, "w": 1, "rw": 2}

    def __init__(self, library: AioLibrary, file: FilePath | int, mode: str = "r") -> None:
        """`mode` is "r", "w" (creates, does not truncate) or "rw", and of no account for a descriptor.

        A descriptor stays the caller's, who may close it as soon as requests have been submitted; it is used directly
        if it was opened with O_DIRECT.
        """
        if mode not in self._MODES:
            raise ValueError(f"mode: expected one of {', '.join(self._MODES)}, got {mode!r}")
        if isinstance(file, int):
            self.name = f"fd {file}"
            self.pointer, self.facts = library.adopt_file(file)
        else:
            self.name = os.fspath(file)
            self.pointer, self.facts = library.open_file(self.name, self._MODES[mode])
            if self.facts.is_regular and not self.facts.is_direct:
                _tell_of_page_cache(self.facts.device, self.name, bool(self.facts.is_in_memory))
        self._finalizer = weakref.finalize(self, library.close_file, self.pointer)

    @property
    def is_direct(self) -> bool:
        return bool(self.facts.is_direct)

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Requests in flight are not disturbed."""
        self._finalizer()

    def __enter__(self) -> IOFile:
        return self

    def __exit__(
        self,
        exception_type: Optional[Type[BaseException]],
        exception: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()


class IORequest:
    """One transfer. Its memory is kept alive until it is done, whether or not this object is."""

    def __init__(
        self, engine: IOEngine, request_id: int, operation: str, filename: str, offset: int, n_bytes: int
    ) -> None:
        self._engine = engine
        self._id = request_id
        self._lock = threading.Lock()
        self._outcome: Optional[Outcome] = None
        self._device_target: Optional[Tuple[torch.Tensor, torch.Tensor]] = None  # (device tensor, staged on the host)
        self.operation = operation
        self.filename = filename
        self.offset = offset
        self.n_bytes = n_bytes

    def done(self) -> bool:
        """Whether it has come to its end, good or bad. Does not wait."""
        return self._settle(timeout_s=0.0)

    def wait(self, timeout_s: Optional[float] = None) -> int:
        """The number of bytes, when all are there. Raises AsyncIOError, or TimeoutError while it goes on."""
        left_s = timeout_s
        while not self._settle(_SLICE_S if left_s is None else min(left_s, _SLICE_S)):
            if left_s is not None:
                left_s -= _SLICE_S
                if left_s <= 0:
                    raise TimeoutError(
                        f"{self.operation} of {self.filename}, offset {self.offset}, {self.n_bytes} bytes: not done "
                        f"after {timeout_s} s"
                    )
        failure = self.error
        if failure is not None:
            raise failure
        return self.n_bytes

    @property
    def error(self) -> Optional[AsyncIOError]:
        """What it failed with; None if it has not failed, or is not done."""
        if self._outcome is None or self._outcome.error == 0:
            return None
        return AsyncIOError(
            self._outcome.error,
            self.operation,
            self.filename,
            self.offset,
            self.n_bytes,
            self._outcome.n_done_bytes,
            self._outcome.error_offset,
        )

    def _settle(self, timeout_s: float) -> bool:
        """Take the outcome from the engine if it is there in time, once."""
        if self._outcome is not None:
            return True
        self._engine.require_own_process()
        with self._lock:
            if self._outcome is None:
                outcome = self._engine.take_outcome(self._id, timeout_s)
                if outcome is None:
                    return False
                if outcome.fell_back:
                    _tell_of_refusal(self.filename)
                if self._device_target is not None and outcome.error == 0:
                    device_tensor, staged = self._device_target
                    device_tensor.copy_(staged.view_as(device_tensor))
                self._device_target = None
                self._outcome = outcome
                self._engine.forget(self._id)
        return True

    def __del__(self) -> None:
        if self._outcome is None:
            self._engine.abandon(self._id, f"{self.operation} of {self.filename}, offset {self.offset}")


class IOEngine:
    """Carries out requests on threads of its own, which end with `close()`. Thread-safe; of one process.

    `block_bytes`: requests are cut into blocks of this size (whole pages). `queue_depth`: how many blocks each thread
    has under way at once. Requests are begun in the order in which they come, and may end in another: whoever reads
    what is being written waits first.
    """

    def __init__(
        self,
        library: AioLibrary,
        block_bytes: int = 1024**2,
        queue_depth: int = 32,
        n_threads: int = 1,
        backend: Optional[str] = None,
    ) -> None:
        for name, value in (
            ("block size", block_bytes),
            ("queue depth", queue_depth),
            ("number of threads", n_threads),
        ):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self._library = library
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._in_flight: Dict[int, object] = {}  # what each request's memory belongs to
        self._abandoned: List[Tuple[int, str]] = []
        self._requests: weakref.WeakValueDictionary[int, IORequest] = weakref.WeakValueDictionary()
        self._pointer = library.open_engine(
            min(block_bytes, _MOST_BLOCK_BYTES), min(queue_depth, _MOST_QUEUE_DEPTH), n_threads, Backend.named(backend)
        )
        # The memory of what is in flight hangs on the arguments. Not at exit, when other threads may still wait here.
        self._finalizer = weakref.finalize(self, _close, library, self._pointer, self._in_flight)
        self._finalizer.atexit = False
        _OPEN.add(self)

    def open(self, path: FilePath, mode: str = "r") -> IOFile:
        return IOFile(self._library, path, mode)

    def submit_read(self, file: IOFile | FilePath | int, memory: Memory, file_offset: int = 0) -> IORequest:
        """Fill memory from a file. Fewer bytes than the memory has room for are an error."""
        return self._submit(False, file, memory, file_offset)

    def submit_write(self, file: IOFile | FilePath | int, memory: Memory, file_offset: int = 0) -> IORequest:
        """Write memory to a file, which is made if need be and not truncated."""
        return self._submit(True, file, memory, file_offset)

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def stats(self) -> EngineStats:
        self.require_own_process()
        with self._lock:
            self._require_open()
            return self._library.stats(self._pointer)

    def close(self) -> None:
        """Wait for all that is in flight, and end the threads. The results of requests stay to be asked for."""
        if self._process != os.getpid():
            self._finalizer.detach()
            return
        with self._lock:
            if self.is_closed:
                return
            self.inject_hold(False)
            for request in list(self._requests.values()):
                while not request._settle(_SLICE_S):
                    pass
            self._reap_abandoned(timeout_s=_SLICE_S)
            self._finalizer()

    def __enter__(self) -> IOEngine:
        return self

    def __exit__(
        self,
        exception_type: Optional[Type[BaseException]],
        exception: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def inject_result(self, nth_completion: int, result: int) -> None:
        """For tests: the n-th completion from now on ends like this: -errno, or fewer bytes than it did."""
        self._require_open()
        self._library.inject(self._pointer, nth_completion, result)

    def inject_hold(self, is_held: bool) -> None:
        """For tests: begin no block while held."""
        self._require_open()
        self._library.hold(self._pointer, is_held)

    def stop_at_exit(self) -> None:
        """Wait for all that is in flight, without taking a lock that a dead thread may hold."""
        if not self.is_closed:
            self._library.stop_engine(self._pointer)

    def require_own_process(self) -> None:
        # First of all in every call: a lock may have been held by another thread when the process forked.
        if self._process != os.getpid():
            raise ForkedHandleError

    def take_outcome(self, request_id: int, timeout_s: float) -> Optional[Outcome]:
        """For IORequest."""
        self.require_own_process()
        return self._library.wait(self._pointer, request_id, timeout_s)

    def forget(self, request_id: int) -> None:
        """For IORequest, which has the outcome: let go of the request's memory."""
        self._in_flight.pop(request_id, None)
        self._library.forget(self._pointer, request_id)

    def abandon(self, request_id: int, description: str) -> None:
        """For IORequest, when it is gone before its end has been seen. Called by the garbage collector: no locks."""
        self._abandoned.append((request_id, description))

    def _require_open(self) -> None:
        self.require_own_process()
        if self.is_closed:
            raise ValueError("this I/O handle is closed")

    def _submit(
        self,
        is_write: bool,
        file: IOFile | FilePath | int,
        memory: Memory,
        file_offset: int,
    ) -> IORequest:
        self._require_open()
        if file_offset < 0:
            raise ValueError(f"file offset: expected 0 or more, got {file_offset}")
        address, n_bytes, owner, device_target = _memory_of(memory, is_write)
        if file_offset + n_bytes > _MOST_FILE_BYTES:
            raise ValueError(f"no file has {n_bytes} bytes at offset {file_offset}")
        if not isinstance(file, IOFile):
            with IOFile(self._library, file, "w" if is_write else "r") as opened:
                return self._begin(is_write, opened, file_offset, address, n_bytes, owner, device_target)
        if file.is_closed:
            raise ValueError(f"{file.name} is closed")
        return self._begin(is_write, file, file_offset, address, n_bytes, owner, device_target)

    def _begin(
        self,
        is_write: bool,
        file: IOFile,
        file_offset: int,
        address: int,
        n_bytes: int,
        owner: object,
        device_target: Optional[Tuple[torch.Tensor, torch.Tensor]],
    ) -> IORequest:
        with self._lock:
            self._require_open()
            self._reap_abandoned(timeout_s=0.0)
            request_id = self._library.submit(self._pointer, file.pointer, is_write, file_offset, address, n_bytes)
            self._in_flight[request_id] = owner
            operation = "write" if is_write else "read"
            request = IORequest(self, request_id, operation, file.name, file_offset, n_bytes)
            request._device_target = device_target
            self._requests[request_id] = request
            return request

    def _reap_abandoned(self, timeout_s: float) -> None:
        """Let go of the memory of requests that nobody asks for any more, and log those that failed."""
        for _ in range(len(self._abandoned)):
            request_id, description = self._abandoned.pop(0)
            outcome = self.take_outcome(request_id, timeout_s)
            if outcome is None:
                self._abandoned.append((request_id, description))
                continue
            self.forget(request_id)
            if outcome.error != 0:
                logger.error("%s failed and nobody asked: %s", description, os.strerror(outcome.error))


# At exit these are stopped, not freed: a daemon thread may be waiting in one.
_OPEN: weakref.WeakSet[IOEngine] = weakref.WeakSet()


@atexit.register
def _stop_at_exit() -> None:
    for engine in list(_OPEN):
        engine.stop_at_exit()


def _close(library: AioLibrary, engine: int, in_flight: Dict[int, object]) -> None:
    library.close_engine(engine)
    in_flight.clear()


def _memory_of(memory: Memory, is_write: bool) -> Tuple[int, int, object, Optional[Tuple[torch.Tensor, torch.Tensor]]]:
    """Address, size, what keeps it alive, and for a read into another device's memory that and where it is staged."""
    if not isinstance(memory, torch.Tensor):
        address, n_bytes = memory
        if n_bytes < 0 or (n_bytes > 0 and address == 0):
            raise ValueError(f"expected (address, number of bytes), got {memory!r}")
        return address, n_bytes, None, None
    if memory.layout != torch.strided or not memory.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor, got shape {tuple(memory.shape)}"
            + (f" with strides {memory.stride()}" if memory.layout == torch.strided else f" of layout {memory.layout}")
        )
    # Shares the memory, and holds it even if somebody gives the tensor other data meanwhile.
    tensor = memory.detach()
    device_target = None
    if tensor.device.type == "meta":
        raise ValueError("expected a tensor with memory, got one on the meta device")
    if tensor.device.type != "cpu":  # not run on a GPU yet
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if is_write:
            staged.copy_(tensor)
        else:
            device_target = (tensor, staged)
        tensor = staged
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor, device_target


def _tell_of_page_cache(device: int, name: str, is_in_memory: bool) -> None:
    if not is_first_time(("page cache", device)):
        return
    if is_in_memory:
        logger.warning("%s is on a file system that is memory: what is put there frees none", name)
    else:
        logger.warning("the file system of %s does not take O_DIRECT; going through the page cache", name)


def _tell_of_refusal(name: str) -> None:
    if is_first_time(("refusal", os.path.split(name)[0])):
        logger.warning("%s: a direct transfer was refused; going through the page cache", name)
