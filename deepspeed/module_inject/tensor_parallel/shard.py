"""Carrying a plan out on a model that is in memory: each rank keeps its part of each parameter."""

from __future__ import annotations

from typing import Optional

import torch
from deepspeed.runtime.swap_tensor.heap import HeapTrimmer
from torch import nn

from .layout import Plan


def shard_in_memory(model: nn.Module, plan: Plan, rank: int, dtype: Optional[torch.dtype] = None) -> None:
    """Replace what each parameter holds by this rank's part, one after the other.

    The parameters stay the objects that they are, so ties and references keep; the memory of the rest is free as soon
    as a parameter is done, unless somebody outside holds it. Floating-point parameters become ``dtype``.
    """
    heap = HeapTrimmer()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            split = plan.splits.get(name)
            part = _own(parameter.data) if split is None else split.take(parameter.data, rank)
            if dtype is not None and part.is_floating_point():
                part = part.to(dtype)
            whole_bytes = parameter.numel() * parameter.element_size()
            parameter.data = part
            heap.freed(whole_bytes - part.numel() * part.element_size())
    heap.freed(heap.after_bytes)
    drop_repeated(model, plan, rank)
    model.requires_grad_(False)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in memory that holds nothing else: a small one may be a view of a whole file that was mapped."""
    own_bytes = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == own_bytes else tensor.clone()


def drop_repeated(model: nn.Module, plan: Plan, rank: int) -> None:
    """Biases that are added to each partial sum: only rank 0 adds them."""
    if rank == 0:
        return
    for name in plan.once:
        parent_name, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if isinstance(parent, nn.Linear):
            parent.bias = None
        else:
            with torch.no_grad():
                getattr(parent, attribute).zero_()
