"""Carrying a plan out on a model that is in memory: each rank keeps its part of each parameter."""

from __future__ import annotations

from typing import Optional

import torch
from torch import nn

from .layout import Plan


def shard_in_memory(model: nn.Module, plan: Plan, rank: int, dtype: Optional[torch.dtype] = None) -> None:
    """Replace what each parameter holds by this rank's part, one after the other.

    The parameters stay the objects that they are, so ties and references keep; the memory of the rest is free as soon
    as a parameter is done, unless somebody outside holds it. Floating-point parameters become ``dtype``.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            split = plan.splits.get(name)
            part = parameter.data if split is None else split.take(parameter.data, rank)
            if dtype is not None and part.is_floating_point():
                part = part.to(dtype)
            parameter.data = part
    drop_repeated(model, plan, rank)
    model.requires_grad_(False)


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
