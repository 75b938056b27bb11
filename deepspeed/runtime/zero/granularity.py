"""Which modules are so fine-grained that they are better fetched as one (``stage3_module_granularity_threshold``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch.nn import Module

MAX_LEAF_NUMEL = 1_000_000_000
"""A larger module is never made a leaf: all of it would be whole at once."""

_CONTAINERS = tuple(getattr(torch.nn.modules.container, name) for name in torch.nn.modules.container.__all__)


@dataclass(frozen=True)
class Grain:
    """A module that could be a leaf, and its elements per layer."""

    module: Module
    numel_per_layer: int


def find_leaves(root: Module, threshold_numel: int) -> tuple[list[Module], Optional[Grain]]:
    """The outermost modules with at most ``threshold_numel`` elements per layer, and the finest module of all.

    A layer is a module that has parameters, itself or in what it contains. A container is no candidate, since its
    forward is not called.
    """
    finest: Optional[Grain] = None
    leaves: list[Module] = []
    pending = [root]
    while pending:
        module = pending.pop()
        grain = _grain(module)
        if grain is not None and (finest is None or grain.numel_per_layer < finest.numel_per_layer):
            finest = grain
        if grain is not None and grain.numel_per_layer <= threshold_numel:
            leaves.append(module)
        else:
            pending.extend(reversed(list(module.children())))
    return leaves, finest


def _grain(module: Module) -> Optional[Grain]:
    if isinstance(module, _CONTAINERS) or not any(True for _ in module.children()):
        return None
    numel = sum(_numel(param) for param in module.parameters())
    if not numel or numel > MAX_LEAF_NUMEL:
        return None
    has_params = (
        any(True for _ in part.parameters()) for part in module.modules() if not isinstance(part, _CONTAINERS)
    )
    return Grain(module, numel // sum(has_params))


def _numel(param: torch.nn.Parameter) -> int:
    return int(getattr(param, "ds_numel", param.numel()))
