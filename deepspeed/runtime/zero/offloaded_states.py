"""What an engine keeps on the device, moved to the host for as long as something else needs the device.

`DeepSpeedEngine.offload_states` and `reload_states`; the base's moved the state of its own Adam only, and gave frozen
parameters the memory of others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from deepspeed.accelerator import get_accelerator


class OffloadedStates:
    """Tensors whose ``data`` is on the host, and will be put back where it was."""

    def __init__(self, pin_memory: bool, non_blocking: bool) -> None:
        self._pin_memory = pin_memory
        self._non_blocking = non_blocking
        self._devices: list[tuple[torch.Tensor, torch.device]] = []

    def move(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move each to the host. What is there already stays as it is."""
        for tensor in tensors:
            if tensor.device.type != "cpu":
                self._devices.append((tensor, tensor.device))
                tensor.data = self._on_host(tensor.data)

    def restore(self, non_blocking: bool) -> None:
        """Put each back on its device."""
        on_host = [tensor.data for tensor, _ in self._devices]
        for tensor, device in self._devices:
            tensor.data = tensor.data.to(device, non_blocking=non_blocking)
        if non_blocking:
            # Copies may still read there.
            get_accelerator().synchronize()
        self._devices.clear()
        del on_host

    def _on_host(self, data: torch.Tensor) -> torch.Tensor:
        if not self._pin_memory:
            return data.to("cpu", non_blocking=self._non_blocking)
        copy: torch.Tensor = get_accelerator().pin_memory(torch.empty_like(data, device="cpu"))
        copy.copy_(data, non_blocking=self._non_blocking)
        return copy


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Its state, without counts: those may have to be on the host anyway, and take no memory."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())
