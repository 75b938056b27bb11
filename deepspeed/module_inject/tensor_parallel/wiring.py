"""Making a model whose parameters are divided compute what it computed before: numbers it keeps, and hooks.

Every hook is a removable handle. Modules keep their classes and their forwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .collectives import TensorParallelGroup
from .layout import Gathered, LookedUp, Plan, RankSize
from .moe_sum import sum_experts


class _Lookup:
    """An embedding that has rows ``[start, stop)``: other tokens give zeros, and the sum over the ranks is whole."""

    def __init__(self, lookup: LookedUp, group: TensorParallelGroup) -> None:
        ((self._start, self._stop),) = lookup.split.spans[group.rank]
        self._group = group
        self._elsewhere: list[torch.Tensor] = []

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (ids, *rest) = args
        elsewhere = (ids < self._start) | (ids >= self._stop)
        self._elsewhere.append(elsewhere)
        return ((ids - self._start).masked_fill(elsewhere, 0), *rest)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return self._group.add_up(output.masked_fill(self._elsewhere.pop().unsqueeze(-1), 0))


def wire(model: nn.Module, plan: Plan, group: TensorParallelGroup) -> list[RemovableHandle]:
    """Set what modules know of their sizes, and install the hooks. Parameters must hold their values by now: whether
    experts can be summed at once is tried out on each kind of MoE block.
    """
    modules = dict(model.named_modules())
    for size in plan.sizes:
        _set_size(modules[size.module], size, group.rank)
    _note_features(model, plan)
    handles = [_sum_output(modules[name], group) for name in plan.sums]
    for lookup in plan.lookups:
        hooks = _Lookup(lookup, group)
        handles.append(modules[lookup.module].register_forward_pre_hook(hooks.before))
        handles.append(modules[lookup.module].register_forward_hook(hooks.after))
    handles += [_gather_output(modules[output.module], output, group) for output in plan.outputs]
    for norm in plan.norms:
        handles += _gather_input(modules[norm.module], norm, group)
    handles += sum_experts(modules, plan.moe, group)
    return handles


def _set_size(module: nn.Module, size: RankSize, rank: int) -> None:
    if hasattr(module, size.name):
        setattr(module, size.name, size.values[rank])


def _note_features(model: nn.Module, plan: Plan) -> None:
    """in_features, out_features and num_embeddings are those of what is here."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or names.get(id(weight)) not in plan.splits:
            continue
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = weight.shape[0]
            module.padding_idx = None  # an index into the whole table, and it matters for gradients only


def _sum_output(module: nn.Module, group: TensorParallelGroup) -> RemovableHandle:
    return module.register_forward_hook(lambda _module, _args, output: group.add_up(output))


def _gather_output(module: nn.Module, output: Gathered, group: TensorParallelGroup) -> RemovableHandle:
    def hook(_module: nn.Module, _args: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
        return group.put_together(logits, output.features, output.split)

    return module.register_forward_hook(hook)


def _gather_input(module: nn.Module, norm: Gathered, group: TensorParallelGroup) -> list[RemovableHandle]:
    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (features, *rest) = args
        return (group.put_together(features, norm.features, norm.split), *rest)

    def after(_module: nn.Module, _args: tuple[Any, ...], whole: torch.Tensor) -> torch.Tensor:
        return norm.split.take(whole, group.rank)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
