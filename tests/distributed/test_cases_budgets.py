"""``stage3_max_live_parameters`` and ``stage3_prefetch_bucket_size`` hold at every instant (C08)."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import logger
from torch import nn

from benchmarks.traffic import LivePeak
from tests.comparisons import Tolerance, assert_released
from tests.distributed.twins import LR, Twins, statistics_of
from tests.harness import distributed
from tests.models import zero3_config
from tests.moe import Expert, RoutedBlock, RoutedModel, hidden_states, seeded

EXPERTS = 8
STEPS = 4


def numel_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


EXPERT_NUMEL = numel_of(Expert())
BLOCK_NUMEL = numel_of(RoutedBlock(EXPERTS, top_k=1))
EVAL_OR_TRAIN = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
OFFLOADED_OR_NOT = pytest.mark.parametrize("offload", ["none", "cpu"])


def routed_model() -> nn.Module:
    return RoutedModel(layers=2, experts=EXPERTS, top_k=1)


def twins_of(max_live_numel: int, prefetch_numel: int, *, leaf: bool, train: bool, offload: str) -> Twins:
    model = seeded(routed_model)
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [RoutedBlock])
    config = zero3_config(
        offload=offload,
        lr=LR if train else None,
        stage3_max_live_parameters=max_live_numel,
        stage3_prefetch_bucket_size=prefetch_numel,
        stage3_max_reuse_distance=max_live_numel,
    )
    return Twins(model, config)


def output_of(step: int, model: Any, rank: int) -> torch.Tensor:
    # Alike on all ranks, another expert in each step: what the trace expects never quite comes.
    model.route_to((step % EXPERTS,))
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return output


def loss_of(step: int, model: Any, rank: int) -> torch.Tensor:
    return output_of(step, model, rank).square().mean()


def assert_within(limit_numel: int, twins: Twins, observer: LivePeak) -> None:
    assert observer.numel <= limit_numel
    statistics = statistics_of(twins.engine)
    assert observer.numel <= statistics.peak_live_numel <= limit_numel
    assert statistics.live_numel == 0


def run_steps(twins: Twins, train: bool, steps: int = STEPS) -> LivePeak:
    observer = LivePeak(twins.engine.module)
    for step in range(steps):
        if train:
            twins.train(partial(loss_of, step), f"the loss of step {step}", Tolerance(rtol=1e-4, atol=1e-4))
        else:
            twins.compare_forward(partial(output_of, step), f"the output of forward {step}")
        assert_released(twins.engine.module)
    return observer


@distributed(world_size=(1, 2))
@OFFLOADED_OR_NOT
@EVAL_OR_TRAIN
def test_leaf_block_over_the_limit(train: bool, offload: str) -> None:
    """Within the limit of three experts, or an error that says which block needs how much."""
    limit_numel = 3 * EXPERT_NUMEL
    try:
        twins = twins_of(limit_numel, EXPERT_NUMEL, leaf=True, train=train, offload=offload)
        observer = run_steps(twins, train)
    except (ValueError, RuntimeError) as error:
        text = re.sub(r"(?<=\d)[,_](?=\d)", "", str(error))
        assert re.search(r"\bblocks\.[01]\b", text), text
        assert str(BLOCK_NUMEL) in text, text
        assert "stage3_max_live_parameters" in text, text
        assert str(limit_numel) in text, text
    else:
        assert_within(limit_numel, twins, observer)


@distributed(world_size=(1, 2))
@OFFLOADED_OR_NOT
@EVAL_OR_TRAIN
def test_leaf_block_within_the_limit(train: bool, offload: str) -> None:
    """The limit is just what one block needs, so that nothing can be fetched ahead of it."""
    twins = twins_of(BLOCK_NUMEL, BLOCK_NUMEL, leaf=True, train=train, offload=offload)
    observer = run_steps(twins, train)
    assert_within(BLOCK_NUMEL, twins, observer)


@distributed(world_size=(1, 2))
@OFFLOADED_OR_NOT
@EVAL_OR_TRAIN
def test_experts_within_the_limit(train: bool, offload: str) -> None:
    twins = twins_of(3 * EXPERT_NUMEL, 2 * EXPERT_NUMEL, leaf=False, train=train, offload=offload)
    observer = run_steps(twins, train, steps=2 * EXPERTS)
    assert_within(3 * EXPERT_NUMEL, twins, observer)


@distributed(world_size=2)
@EVAL_OR_TRAIN
@pytest.mark.parametrize("prefetch_numel", [0, 100, EXPERT_NUMEL])
def test_no_more_is_fetched_ahead_than_the_bucket_holds(prefetch_numel: int, train: bool) -> None:
    """At any time there is what the running module needs, and at most one bucket that nobody needs yet."""
    config = zero3_config(
        lr=LR if train else None,
        stage3_max_live_parameters=100 * BLOCK_NUMEL,
        stage3_prefetch_bucket_size=prefetch_numel,
        # A module's parameters go when it ends.
        stage3_max_reuse_distance=0,
    )
    twins = Twins(seeded(routed_model), config)
    largest_numel = max(numel_of(module) for module in twins.plain.modules() if not list(module.children()))
    observer = run_steps(twins, train)
    assert_within(largest_numel + prefetch_numel, twins, observer)
    assert observer.numel > 0


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What DeepSpeed's logger is told at level WARNING or above while inside."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Keep(level=logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@distributed(world_size=2)
@OFFLOADED_OR_NOT
@EVAL_OR_TRAIN
def test_module_over_the_limit_is_warned_of(train: bool, offload: str) -> None:
    """A module that is no leaf block and needs more than the limit runs, as it always did, with a warning."""
    limit_numel = 100
    with warnings_logged() as warnings:
        twins = twins_of(limit_numel, 0, leaf=False, train=train, offload=offload)
        run_steps(twins, train)
    named = [text for text in warnings if re.search(r"\b(first|last|blocks\.[01]\.[\w.]+)\b", text)]
    assert any("stage3_max_live_parameters" in text for text in named), warnings
    # Once for a module and not for each pass.
    modules = sum(1 for _ in twins.plain.modules())
    assert len(named) <= modules


@distributed(world_size=(1, 2))
def test_limit_of_one_engine_is_not_that_of_another() -> None:
    tight = twins_of(3 * EXPERT_NUMEL, EXPERT_NUMEL, leaf=False, train=False, offload="none")
    wide = twins_of(100 * BLOCK_NUMEL, 50 * BLOCK_NUMEL, leaf=False, train=False, offload="none")
    observer = LivePeak(tight.engine.module)
    for step in range(STEPS):
        for twins in (wide, tight):
            twins.compare_forward(partial(output_of, step), f"the output of forward {step}")
    assert_within(3 * EXPERT_NUMEL, tight, observer)
