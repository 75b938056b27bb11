"""What `PinMemoryBuilder().load()` gives: pinned memory without the rest of the I/O op."""

from __future__ import annotations

import torch

from .library import PagesLibrary
from .pinned import PINNED


class PinMemoryOp:
    def __init__(self, library: PagesLibrary) -> None:
        self._library = library

    def pin_handle(self) -> PinHandle:
        return PinHandle(self._library)


class PinHandle:
    """Every handle sees the same memory, which it shares with the handles of the I/O op."""

    def __init__(self, library: PagesLibrary) -> None:
        self._library = library

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        # The caller, deepspeed/utils/pin_memory.py, makes it known to the device itself.
        return PINNED.allocate(self._library, num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        return PINNED.free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        return PINNED.free(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return buffer.is_pinned() or PINNED.holds(buffer)
