"""The interface of DeepSpeed's async_io op: what `AsyncIOBuilder().load()` gives, and its handles.

Names, order and defaults of arguments, and what is returned, are DeepSpeed's; failures raise (see `engine.py`) where
it returned -1 or ended the process.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Deque, List, Optional, Union

import torch

from .engine import AsyncIOError, FilePath, IOEngine, IOFile, IORequest
from .library import AioLibrary
from .pinned import PINNED

# Callers size and align their buffers by it; the engine itself takes anything.
_ALIGNMENT_BYTES = 512
_COMPARE_BYTES = 16 * 1024**2

Filename = Union[FilePath, int]


class AsyncIOOp:
    """What the builder loads."""

    def __init__(self, library: AioLibrary) -> None:
        self._library = library

    def aio_handle(
        self,
        block_size: int = 1024**2,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> AioHandle:
        return AioHandle(self._library, block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)

    def engine(
        self,
        block_bytes: int = 1024**2,
        queue_depth: int = 32,
        n_threads: int = 1,
        backend: Optional[str] = None,
    ) -> IOEngine:
        """For code that schedules its own requests."""
        return IOEngine(self._library, block_bytes, queue_depth, n_threads, backend)

    def open(self, path: FilePath, mode: str = "r") -> IOFile:
        return IOFile(self._library, path, mode)

    def pinned_empty(self, numel: int, dtype: torch.dtype, must_lock: bool = False) -> torch.Tensor:
        """A flat tensor of pinned memory, which lasts as long as it and its views do."""
        return PINNED.allocate(self._library, numel, dtype, must_lock=must_lock, register_device=True)

    def aio_read(
        self,
        buffer: torch.Tensor,
        filename: Filename,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        validate: bool,
    ) -> int:
        """Read a whole file with a handle of its own. Returns 0."""
        with self.aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
            return handle.read(buffer, filename, validate)

    def aio_write(
        self,
        buffer: torch.Tensor,
        filename: Filename,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        validate: bool,
    ) -> int:
        """Write a file with a handle of its own. Returns 0."""
        with self.aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
            return handle.write(buffer, filename, validate)

    @staticmethod
    def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
        """Copy all of one tensor into another of as many elements. Returns 0."""
        if dest.numel() != src.numel():
            raise ValueError(f"expected as many elements in both tensors, got {dest.numel()} and {src.numel()}")
        dest.copy_(src.reshape(dest.shape))
        return 0


@dataclass(frozen=True)
class _Pending:
    """A request that wait() owes an answer for. `checked` is its tensor, if it is to be compared with the file."""

    request: IORequest
    checked: Optional[torch.Tensor]

    def finish(self) -> None:
        self.request.wait()
        if self.checked is not None:
            _compare_with_file(self.checked, self.request)


class AioHandle:
    """Reads and writes of tensors that overlap, and one wait for all of them.

    Every path is opened for its request alone. `single_submit` and `overlap_events` are kept and told, and change
    nothing: blocks are always handed over together and taken as they come. Thread-safe; of the process that made it.
    """

    def __init__(
        self,
        library: AioLibrary,
        block_size: int = 1024**2,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._library = library
        self._settings = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._lock = threading.RLock()
        self._pending: Deque[_Pending] = deque()
        self.engine = IOEngine(library, block_size, queue_depth, intra_op_parallelism)

    def get_block_size(self) -> int:
        return self._settings[0]

    def get_queue_depth(self) -> int:
        return self._settings[1]

    def get_single_submit(self) -> bool:
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        return self._settings[4]

    def get_alignment(self) -> int:
        """What callers round their buffers to. A multiple of this goes past the page cache but for a last part page."""
        return _ALIGNMENT_BYTES * self._settings[4]

    def read(self, buffer: torch.Tensor, filename: Filename, validate: bool, file_offset: int = 0) -> int:
        """Read now, whatever else is under way. Returns 0."""
        return self._now(self._begin(False, buffer, filename, validate, file_offset))

    def write(self, buffer: torch.Tensor, filename: Filename, validate: bool, file_offset: int = 0) -> int:
        """Write now, whatever else is under way. Returns 0."""
        return self._now(self._begin(True, buffer, filename, validate, file_offset))

    def pread(
        self,
        buffer: torch.Tensor,
        filename: Filename,
        validate: bool,
        is_async: Optional[bool] = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """`is_async` (as a keyword: `async`): return 0 at once; else `wait()` for everything and return its count."""
        begun = self._begin(False, buffer, filename, validate, file_offset)
        return self._later(begun, _is_async("pread", is_async, keywords))

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Filename,
        validate: bool,
        is_async: Optional[bool] = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """As `pread`, the other way. The file is made if need be, and not truncated."""
        begun = self._begin(True, buffer, filename, validate, file_offset)
        return self._later(begun, _is_async("pwrite", is_async, keywords))

    def sync_pread(self, buffer: torch.Tensor, filename: Filename, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: Filename, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: Filename, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self, buffer: torch.Tensor, filename: Optional[Filename] = None, file_offset: int = 0, fd: Optional[int] = None
    ) -> int:
        """By name, or to a descriptor of the caller's, which may be closed as soon as this has returned."""
        file = filename if fd is None else fd
        if file is None:
            raise TypeError("async_pwrite: expected filename or fd")
        return self.pwrite(buffer, file, False, True, file_offset)

    def wait(self) -> int:
        """Wait for everything that was begun and not waited for; returns how many requests that were.

        If some failed, the first one's error is raised when all have come to their end; `also_failed` has the others.
        """
        self.engine.require_own_process()
        errors: List[OSError] = []
        n_requests = 0
        with self._lock:
            while self._pending:
                try:
                    self._pending[0].finish()
                except OSError as error:
                    errors.append(error)
                self._pending.popleft()
                n_requests += 1
        if errors:
            first, *others = errors
            if isinstance(first, AsyncIOError):
                first.also_failed = tuple(others)
            raise first
        return n_requests

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A flat tensor of pinned memory with the dtype of the example (whose name is DeepSpeed's)."""
        return PINNED.allocate(self._library, num_elem, example_tenosr.dtype, register_device=True)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Give the memory of such a tensor back. False if it is none, or a view that does not begin where it does."""
        return PINNED.free(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return buffer.is_pinned() or PINNED.holds(buffer)

    def close(self) -> None:
        """Wait for everything in flight and end the threads. Failures nobody waited for are not raised."""
        self.engine.close()

    def __enter__(self) -> AioHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(
        self, is_write: bool, buffer: torch.Tensor, filename: Filename, validate: bool, file_offset: int
    ) -> _Pending:
        if validate and isinstance(filename, int):
            raise ValueError("validate: expected the name of a file, which is read again, got a descriptor")
        submit = self.engine.submit_write if is_write else self.engine.submit_read
        return _Pending(submit(filename, buffer, file_offset), buffer if validate else None)

    @staticmethod
    def _now(begun: _Pending) -> int:
        begun.finish()
        return 0

    def _later(self, begun: _Pending, is_async: bool) -> int:
        with self._lock:
            self._pending.append(begun)
        return 0 if is_async else self.wait()


def _is_async(method: str, positional: Optional[bool], keywords: Any) -> bool:
    """The argument is called `async`, which Python does not let a parameter be called."""
    value = keywords.pop("async", positional)
    if value is None or keywords:
        raise TypeError(f"{method}: expected the argument async, got {', '.join(keywords) or 'nothing'}")
    return bool(value)


def _compare_with_file(tensor: torch.Tensor, request: IORequest) -> None:
    """Raise AsyncIOError unless the file holds what the tensor does, read by other means than the engine's."""
    mine = tensor.detach().cpu().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    with Path(request.filename).open("rb") as file:
        for begin in range(0, len(mine), _COMPARE_BYTES):
            part = mine[begin : begin + _COMPARE_BYTES]
            file.seek(request.offset + begin)
            stored = torch.frombuffer(bytearray(file.read(len(part)) or b"\0"), dtype=torch.uint8)
            if torch.equal(stored, part):
                continue
            n_same = min(len(stored), len(part))
            differs = (stored[:n_same] != part[:n_same]).nonzero()
            at = begin + (int(differs[0]) if len(differs) else n_same)
            raise AsyncIOError(
                errno.EBADMSG,
                f"validation of the {request.operation}",
                request.filename,
                request.offset,
                len(mine),
                at,
                request.offset + at,
            )
