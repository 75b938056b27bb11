"""Which modules are fine-grained enough to be fetched as one, with the numbers counted by hand."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero import granularity
from deepspeed.runtime.zero.granularity import find_leaves
from torch import nn


class Block(nn.Module):
    """An inner module: two Linears of 6 elements each, and perhaps a parameter of its own."""

    def __init__(self, own_numel: int = 0) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        if own_numel:
            self.own = nn.Parameter(torch.zeros(own_numel))


class Wrapper(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(f"part_{index}", part)


def granularity_of(module: nn.Module) -> int:
    """Elements per layer: the least threshold that makes ``module`` a leaf."""
    _, finest = find_leaves(module, threshold_numel=-1)
    assert finest is not None
    for numel in range(10_000):
        leaves, _ = find_leaves(module, numel)
        if leaves == [module]:
            return numel
    raise AssertionError("never a leaf")


@pytest.mark.parametrize(
    ("module", "numel_per_layer"),
    [
        # a, b and the block itself: three layers of 12 elements together.
        (Block(), 12 // 3),
        (Block(own_numel=9), 21 // 3),
        # Two blocks of three layers, and the wrapper.
        (Wrapper(Block(), Block()), 24 // 7),
        (Wrapper(Block(own_numel=9)), 21 // 4),
        # A container and a module without parameters are no layers.
        (Wrapper(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.GELU()), 12 // 3),
        (Wrapper(nn.Linear(2, 2), Wrapper(nn.GELU())), 6 // 2),
    ],
)
def test_elements_are_counted_per_layer(module: nn.Module, numel_per_layer: int) -> None:
    """A layer is whatever has parameters, itself or in its parts, but for containers."""
    assert granularity_of(module) == numel_per_layer


def test_the_outermost_module_that_is_fine_enough_is_the_leaf() -> None:
    fine, coarse = Block(), nn.Linear(100, 100)
    model = Wrapper(Wrapper(fine), coarse)
    leaves, finest = find_leaves(model, threshold_numel=4)
    assert leaves == [model.part_0]
    assert finest is not None
    leaves, _ = find_leaves(model, threshold_numel=10_000)
    assert leaves == [model]


def test_leaves_come_in_the_order_of_the_model() -> None:
    blocks = [Block() for _ in range(4)]
    coarse = Wrapper(nn.Linear(50, 50))
    leaves, _ = find_leaves(Wrapper(*blocks[:2], coarse, *blocks[2:]), threshold_numel=4)
    assert leaves == blocks


def test_without_a_leaf_the_finest_module_tells_what_would_do() -> None:
    fine = Block()
    leaves, finest = find_leaves(Wrapper(nn.Linear(50, 50), fine), threshold_numel=3)
    assert leaves == []
    assert finest is not None
    assert (finest.module, finest.numel_per_layer) == (fine, 4)
    leaves, _ = find_leaves(Wrapper(nn.Linear(50, 50), fine), finest.numel_per_layer)
    assert leaves == [fine]


@pytest.mark.parametrize("container", [nn.ModuleList, lambda parts: nn.Sequential(*parts)])
def test_a_container_is_no_leaf_but_its_parts_may_be(container) -> None:
    blocks = [Block(), Block()]
    leaves, _ = find_leaves(container(blocks), threshold_numel=10_000)
    assert leaves == blocks


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.GELU(), Wrapper(nn.GELU())])
def test_a_module_without_parts_or_parameters_is_no_leaf(module: nn.Module) -> None:
    assert find_leaves(module, threshold_numel=10_000) == ([], None)


def test_a_large_module_is_no_leaf_but_its_parts_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granularity, "MAX_LEAF_NUMEL", 20)
    blocks = [Block(), Block()]
    leaves, finest = find_leaves(Wrapper(*blocks), threshold_numel=10_000)
    assert leaves == blocks
    assert finest is not None
    assert finest.module in blocks


def test_a_partitioned_parameter_counts_with_all_its_elements() -> None:
    block = Block()
    for param in block.parameters():
        param.ds_numel = param.numel()
        param.data = torch.empty(0)
    assert granularity_of(block) == 12 // 3
