"""Counting what an engine gathers and holds, from outside, the same for every release of DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


@dataclass
class Traffic:
    """All-gathers that DeepSpeed's communication layer was asked for since this object was made."""

    gathers: int = 0
    received_bytes: int = 0

    def __post_init__(self) -> None:
        self._count(deepspeed_comm.cdb)
        with contextlib.suppress(ModuleNotFoundError):
            # The fork's, between CPUs.
            self._count(importlib.import_module("deepspeed.runtime.zero.pairwise"))

    def _count(self, owner: Any) -> None:
        gather = owner.all_gather_into_tensor

        def counted(output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.gathers += 1
            self.received_bytes += output_tensor.numel() * output_tensor.element_size()
            return gather(output_tensor, *args, **kwargs)

        owner.all_gather_into_tensor = counted


class LivePeak:
    """The most elements that were whole or in flight when a module began, in forward or backward."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.numel = 0
        self._parameters = list(module.parameters())
        for part in module.modules():
            part.register_forward_pre_hook(self._look)
            part.register_forward_hook(self._look_in_backward)

    def _look(self, *_: object) -> None:
        live = (p for p in self._parameters if p.ds_status is not ZeroParamStatus.NOT_AVAILABLE and not p.ds_persist)
        self.numel = max(self.numel, sum(p.ds_numel for p in live))

    def _look_in_backward(self, _: torch.nn.Module, __: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._look)
