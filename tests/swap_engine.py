"""A stand-in for the I/O engine: plain file I/O, done when it is waited for, with faults on demand."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

import torch
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES


@dataclass(eq=False)
class PlainRequest:
    """Transfers nothing before `wait`, so that whoever does not wait is found out."""

    engine: PlainEngine
    path: str
    offset_bytes: int
    data: torch.Tensor
    is_write: bool
    done: bool = False

    def wait(self) -> int:
        if self.done:
            return self.data.numel()
        self.done = True
        self.engine.in_flight.remove(self)
        self.engine.fail_if_told(self)
        flags = os.O_RDWR if self.is_write else os.O_RDONLY
        descriptor = os.open(self.path, flags)
        try:
            buffer = self.data.numpy()
            move = os.pwritev if self.is_write else os.preadv
            got = move(descriptor, [buffer], self.offset_bytes)
        finally:
            os.close(descriptor)
        if got != self.data.numel():
            raise OSError(
                errno.EIO, f"offset {self.offset_bytes}: wanted {self.data.numel()} bytes, got {got}", self.path
            )
        return got


@dataclass(eq=False)
class PlainEngine:
    """Submits `PlainRequest`s. ``faults`` are errors for the n-th request, counted from 0."""

    faults: dict[int, OSError] = field(default_factory=dict)
    in_flight: list[PlainRequest] = field(default_factory=list)
    most_in_flight: int = 0
    submitted: int = 0

    def __post_init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def submit_read(self, file: str, memory: torch.Tensor, file_offset: int = 0) -> PlainRequest:
        return self._submit(PlainRequest(self, file, file_offset, memory, is_write=False))

    def submit_write(self, file: str, memory: torch.Tensor, file_offset: int = 0) -> PlainRequest:
        return self._submit(PlainRequest(self, file, file_offset, memory, is_write=True))

    def fail_if_told(self, request: PlainRequest) -> None:
        fault = self.faults.get(self._numbers[id(request)])
        if fault is not None:
            raise fault

    def _submit(self, request: PlainRequest) -> PlainRequest:
        if request.data.data_ptr() % PAGE_BYTES or request.data.dtype != torch.uint8:
            raise AssertionError("the tier promises bytes that begin at a page")
        self._numbers[id(request)] = self.submitted
        self.submitted += 1
        self.in_flight.append(request)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return request
