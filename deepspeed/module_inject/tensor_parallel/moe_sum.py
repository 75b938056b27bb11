"""One sum over the ranks for a whole MoE block, where its output is a sum of its experts' outputs.

[Note: is a block a sum of its experts?]
A block routes tokens, weighs what experts give, and adds it up; shared experts may be added, too. Partial sums of the
experts can go through all of that, and be added up over the ranks at the end, if the block's output is additive in
them: f(a + b) = f(a) + f(b). Nothing in a block's structure says so: a residual, a bias or a norm would be wrong. So it
is tried: with random numbers as what the experts give, the block runs three times, with a, b, and a + b. An output
that is the same each time (router scores) is left alone, one that is additive is summed, and if there is any other,
each expert's output is summed by itself. The numbers are the same on every rank, and ranks compare what they found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from deepspeed.utils import logger
from torch import nn
from torch.utils.hooks import RemovableHandle

from .blocks import MoeBlock
from .collectives import TensorParallelGroup

_PROBE_TOKENS = 4
_PROBE_SEED = 20_731
_TOLERANCE = 0.05
"""Rounding of 16-bit types stays far below it, and what is not additive far above."""


def sum_experts(
    modules: Mapping[str, nn.Module], blocks: Sequence[MoeBlock], group: TensorParallelGroup
) -> list[RemovableHandle]:
    """Hooks that add up what the experts of ``blocks`` give. Runs a block of each kind three times: a collective."""
    handles: list[RemovableHandle] = []
    found: dict[tuple[Any, ...], Optional[tuple[int, ...]]] = {}
    for block in blocks:
        kind = _kind(modules, block)
        if kind not in found:
            found[kind] = _agreed(_summed_outputs(modules, block), group)
            if found[kind] is None:
                logger.warning(
                    "%s is not a mere sum of its experts' outputs: each of them is added up over the ranks by itself",
                    block.name,
                )
        outputs = found[kind]
        if outputs is None:
            handles += [_sum_outputs(modules[term], (0,), group) for term in block.terms]
        else:
            handles.append(_sum_outputs(modules[block.name], outputs, group))
    return handles


def _kind(modules: Mapping[str, nn.Module], block: MoeBlock) -> tuple[Any, ...]:
    """Blocks of one kind run the same code."""
    terms = tuple(term[len(block.name) :] for term in block.terms)
    return (type(modules[block.name]), terms, tuple(type(modules[term]) for term in block.terms))


def _sum_outputs(module: nn.Module, outputs: Sequence[int], group: TensorParallelGroup) -> RemovableHandle:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return group.add_up(output)
        return tuple(group.add_up(item) if index in outputs else item for index, item in enumerate(output))

    return module.register_forward_hook(hook)


def _agreed(outputs: Optional[tuple[int, ...]], group: TensorParallelGroup) -> Optional[tuple[int, ...]]:
    """What all ranks found, or None: a rank that finds something else must not sum at another place."""
    mask = -1 if outputs is None else sum(1 << index for index in outputs)
    everyone = group.exchange([mask]).flatten().tolist()
    return outputs if all(mask == other for other in everyone) else None


def _summed_outputs(modules: Mapping[str, nn.Module], block: MoeBlock) -> Optional[tuple[int, ...]]:
    """Which of the block's outputs are sums of its experts' outputs; None if that cannot be said of all."""
    module = modules[block.name]
    parameter = next(module.parameters())
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    tokens = torch.randn((1, _PROBE_TOKENS, block.hidden), generator=generator)
    tokens = tokens.to(device=parameter.device, dtype=parameter.dtype)
    terms = [modules[term] for term in block.terms]
    try:
        first, second, both = (_run(module, terms, tokens, parts) for parts in ((0,), (1,), (0, 1)))
    except Exception as error:  # the block's own code, with arguments that it may not expect
        logger.debug("%s cannot be tried out by itself: %s", block.name, error)
        return None
    if not len(first) == len(second) == len(both):
        return None
    summed = []
    for index, (a, b, a_and_b) in enumerate(zip(first, second, both)):
        if not isinstance(a, torch.Tensor):
            if a is not None:
                return None
        elif _near(a, b) and _near(a, a_and_b):
            continue
        elif _near(a + b, a_and_b):
            summed.append(index)
        else:
            return None
    return tuple(summed) or None


def _near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    scale = expected.double().norm()
    return bool((actual.double() - expected.double()).norm() <= _TOLERANCE * scale)


def _run(module: nn.Module, terms: Sequence[nn.Module], tokens: torch.Tensor, parts: Sequence[int]) -> tuple[Any, ...]:
    """The block's outputs, where experts give the sum of random ``parts`` instead of what they compute."""
    generators = {part: torch.Generator().manual_seed(_PROBE_SEED + 1 + part) for part in parts}

    def instead(_module: nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        drawn = [torch.randn(output.shape, generator=generators[part]) for part in parts]
        return torch.stack(drawn).sum(dim=0).to(device=output.device, dtype=output.dtype)

    handles = [term.register_forward_hook(instead) for term in terms]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = module(tokens.clone())
    finally:
        for handle in handles:
            handle.remove()
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)
