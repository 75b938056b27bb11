"""Control flow that depends on the data: between steps (C03, C04), and between ranks (C01, C02 and their kind).

``tests/reports/test_r_mixtral_inflight.py`` has the plain forms of C01 and C02.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comparisons import Tolerance, assert_released
from tests.distributed.twins import LR, LossOf, Traffic, Twins
from tests.harness import distributed
from tests.models import zero3_config
from tests.moe import HIDDEN, BranchModel, RoutedModel, hidden_states, seeded

STEPS = 4
APART_TIMEOUT_S = 30.0
LOCKSTEP_TIMEOUT_S = 10.0
"""Less than the test's own limit, so that ranks that come apart say so themselves."""
ALL_EXPERTS = (0, 1, 2, 3)
AFTER_TRAINING = Tolerance(atol=1e-3)
"""Weights differ by what the order of additions makes of them, see ``twins.WEIGHTS``."""
Routing = Sequence[int]


def mean_square_of(output_of: LossOf) -> LossOf:
    return lambda model, rank: output_of(model, rank).square().mean()


# -- ranks that run different experts (C01) --


class CheckpointedRoutedModel(RoutedModel):
    """Recomputes each block in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self._reentrant = reentrant

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = self.first(x_TD)
        for block in self.blocks:
            x_TD = checkpoint(block, x_TD, use_reentrant=self._reentrant)
        return self.last(x_TD)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": RoutedModel,
    "checkpoint": partial(CheckpointedRoutedModel, reentrant=False),
    "reentrant checkpoint": partial(CheckpointedRoutedModel, reentrant=True),
}


@dataclass(frozen=True)
class Apart:
    """Which experts each rank runs in each step, and how the model is built and configured."""

    routing: Callable[[int, int], Routing]
    """From the number of a step and of a rank to its experts."""
    model: str = "plain"
    accumulation: int = 1
    steps: int = STEPS
    zero_options: tuple[tuple[str, Any], ...] = ()

    def twins(self, train: bool) -> Twins:
        options = {"stage3_lockstep_timeout_s": LOCKSTEP_TIMEOUT_S, **dict(self.zero_options)}
        config = zero3_config(lr=LR if train else None, **options)
        return Twins(seeded(MODELS[self.model]), {**config, "gradient_accumulation_steps": self.accumulation})

    def output_of(self, step: int, model: Any, rank: int) -> torch.Tensor:
        model.route_to(self.routing(step, rank))
        output: torch.Tensor = model(hidden_states(seed=100 * step + rank))
        return output

    def loss_of(self, step: int) -> LossOf:
        return mean_square_of(partial(self.output_of, step))


def disjoint_pairs(step: int, rank: int) -> Routing:
    return ((0, 1), (2, 3))[rank % 2]


def disjoint_from_step_3(step: int, rank: int) -> Routing:
    return ALL_EXPERTS if step < 3 else disjoint_pairs(step, rank)


def different_numbers(step: int, rank: int) -> Routing:
    return ((1,), (0, 1, 3), (2, 3))[rank]


def none_on_rank_1(step: int, rank: int) -> Routing:
    return () if rank == 1 else (0, 2)


def none_on_any_rank(step: int, rank: int) -> Routing:
    return () if step % 2 else (0, 2)


def rotating(step: int, rank: int) -> Routing:
    return ((step + rank) % 4, (step + 2 * rank + 1) % 4)


def train_apart(case: Apart) -> None:
    twins = case.twins(train=True)
    for step in range(case.steps):
        micro_steps = range(step * case.accumulation, (step + 1) * case.accumulation)
        twins.train_on([case.loss_of(micro_step) for micro_step in micro_steps], f"the loss of step {step}")
        assert_released(twins.engine.module)
    twins.compare_weights()


OFFLOADED = (("offload_param", {"device": "cpu", "pin_memory": False}),)

TRAINED_APART = {
    "accumulation": Apart(disjoint_pairs, accumulation=2),
    "accumulation, from step 3": Apart(disjoint_from_step_3, accumulation=2),
    "checkpoint": Apart(disjoint_pairs, model="checkpoint"),
    "reentrant checkpoint": Apart(disjoint_pairs, model="reentrant checkpoint"),
    "reentrant checkpoint, from step 3": Apart(disjoint_from_step_3, model="reentrant checkpoint", steps=6),
    # Smaller than an expert's matrix: many reductions, in an order that the ranks do not share by themselves.
    "small reduce bucket": Apart(disjoint_pairs, zero_options=(("reduce_bucket_size", 600),)),
    "no contiguous gradients": Apart(disjoint_pairs, zero_options=(("contiguous_gradients", False),)),
    "no expert on rank 1": Apart(none_on_rank_1),
    "no expert on any rank": Apart(none_on_any_rank),
    "different numbers": Apart(different_numbers),
    "rotating": Apart(rotating, steps=8),
    "parameters on the CPU": Apart(rotating, zero_options=OFFLOADED),
    "no prefetch": Apart(rotating, zero_options=(("stage3_prefetch_bucket_size", 0),)),
}


@distributed(world_size=2, timeout_s=APART_TIMEOUT_S)
@pytest.mark.parametrize("case", TRAINED_APART)
def test_training_when_ranks_route_differently(case: str) -> None:
    train_apart(TRAINED_APART[case])


@distributed(world_size=3, timeout_s=APART_TIMEOUT_S)
@pytest.mark.parametrize("routing", [different_numbers, rotating, none_on_rank_1], ids=lambda routing: routing.__name__)
def test_training_when_three_ranks_route_differently(routing: Callable[[int, int], Routing]) -> None:
    train_apart(Apart(routing))


@distributed(world_size=(2, 3), timeout_s=APART_TIMEOUT_S)
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("routing", [different_numbers, rotating, none_on_rank_1], ids=lambda routing: routing.__name__)
def test_forwards_when_ranks_route_differently(routing: Callable[[int, int], Routing], offload: str) -> None:
    case = Apart(routing, zero_options=OFFLOADED if offload == "cpu" else ())
    twins = case.twins(train=False)
    twins.engine.eval()
    for step in range(2 * STEPS):
        twins.compare_forward(partial(case.output_of, step), f"the output of forward {step}")
        assert_released(twins.engine.module)


@distributed(world_size=2, timeout_s=APART_TIMEOUT_S)
def test_forwards_of_different_batch_sizes_between_training_steps(rank: int) -> None:
    """Evaluation with as many batches on each rank, of other sizes and other experts."""
    case = Apart(rotating)
    twins = case.twins(train=True)
    for step in range(STEPS):
        twins.train(case.loss_of(step), f"the loss of step {step}")
        twins.engine.module.route_to(rotating(step + 1, rank))
        twins.plain.route_to(rotating(step + 1, rank))
        x = hidden_states(seed=1000 + 10 * step + rank, tokens=3 + 5 * rank)
        with torch.no_grad():
            AFTER_TRAINING.check(twins.engine(x), twins.plain(x), f"the output after step {step}")
        assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=2, timeout_s=APART_TIMEOUT_S)
def test_ranks_differ_in_one_step_only() -> None:
    """Steps 0-3 alike, 4 different, 5-8 alike: right values, and no negotiation without end."""
    case = Apart(lambda step, rank: disjoint_pairs(step, rank) if step == 4 else ALL_EXPERTS, steps=9)
    twins = case.twins(train=True)
    rounds = []
    for step in range(case.steps):
        before = Traffic.so_far(twins.engine)
        twins.train(case.loss_of(step), f"the loss of step {step}")
        rounds.append((Traffic.so_far(twins.engine) - before).rounds)
    twins.compare_weights()
    modules = sum(1 for _ in twins.engine.module.modules())
    assert rounds[-1] <= 2 * modules, f"expected at most two rounds for each of {modules} modules, got {rounds}"


# -- a block that only some ranks run (C02) --


class TwoTowers(nn.Module):
    """An image tower of several layers, a text tower, and a trunk. Layers of equal and of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(HIDDEN, 24), nn.ReLU(), nn.Linear(24, HIDDEN), nn.LayerNorm(HIDDEN))
        self.text = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.trunk = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x_TD: torch.Tensor, towers: Sequence[str]) -> torch.Tensor:
        hidden_TD = x_TD
        for tower in towers:
            hidden_TD = hidden_TD + self.get_submodule(tower)(x_TD)
        return self.trunk(hidden_TD)


TOWERS: dict[str, Callable[[int, int], Sequence[str]]] = {
    "image on rank 0": lambda step, rank: ("image",) if rank == 0 else (),
    "one each": lambda step, rank: (("image",), ("text",))[rank],
    "another order": lambda step, rank: (("image", "text"), ("text", "image"))[rank],
    "image twice on rank 1": lambda step, rank: (("image",), ("image", "image"))[rank],
    "by turns": lambda step, rank: ("image", "text") if (step + rank) % 2 else ("text",),
    "from step 3 on": lambda step, rank: ("text", "image") if step < 3 or rank == 0 else ("text",),
}


def output_of_towers(towers_of: Callable[[int, int], Sequence[str]], step: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank), towers_of(step, rank))
    return output


@distributed(world_size=2, timeout_s=APART_TIMEOUT_S)
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("towers", TOWERS)
def test_blocks_that_some_ranks_run(towers: str, train: bool) -> None:
    towers_of = TOWERS[towers]
    twins = Twins(seeded(TwoTowers), zero3_config(lr=LR, stage3_lockstep_timeout_s=LOCKSTEP_TIMEOUT_S))
    for step in range(6):
        output_of = partial(output_of_towers, towers_of, step)
        if train:
            twins.train(mean_square_of(output_of), f"the loss of step {step}")
        else:
            twins.compare_forward(output_of, f"the output of forward {step}")
        assert_released(twins.engine.module)
    twins.compare_weights()


# -- a block that only some steps run (C03) --


def with_or_without_branch(step: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank), with_branch=step % 2 == 1)
    return output


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "forward without grad between"])
def test_branch_of_every_other_step(evaluates: bool, offload: str) -> None:
    twins = Twins(seeded(BranchModel), zero3_config(offload=offload, lr=LR))
    for step in range(6):
        output_of = partial(with_or_without_branch, step)
        twins.train(mean_square_of(output_of), f"the loss of step {step}")
        assert_released(twins.engine.module)
        if evaluates:
            twins.compare_forward(output_of, f"the output after step {step}", AFTER_TRAINING)
            assert_released(twins.engine.module)
    twins.compare_weights()


# -- a model that takes its paths in turn (C03, C04) --

WIDTH = 64
"""A matrix of this width squared is above the persistence threshold of C04, a LayerNorm of it below."""
WARM_UP_STEPS = 4
MEASURED_STEPS = 6
"""A whole number of periods of every schedule below."""
SCHEDULES = {"A B": (0, 1), "A A B": (0, 0, 1), "A A A B B B": (0, 0, 0, 1, 1, 1), "A B C": (0, 1, 2)}


class Paths(nn.Module):
    """A trunk, and between its ends one of several paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.paths = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x_TD: torch.Tensor, path: int) -> torch.Tensor:
        hidden_TD = self.norm(self.first(x_TD))
        return self.last(torch.relu(self.middle(self.paths[path](hidden_TD))))


def output_of_path(path: int, step: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank), path)
    return output


def traffic_of(schedule: Sequence[int], evaluates: bool) -> Traffic:
    """What ``MEASURED_STEPS`` steps gather once the schedule is known, comparing every loss."""
    config = zero3_config(
        lr=LR,
        stage3_param_persistence_threshold=1_000,
        stage3_prefetch_bucket_size=10_000,
        stage3_max_live_parameters=40_000,
    )
    twins = Twins(seeded(Paths), config)
    period = len(schedule)
    # What is taken in turn can be expected once it has come round.
    warm_up_steps = (1 - (-WARM_UP_STEPS // period)) * period
    measured_from = Traffic(0, 0, 0, 0)
    for step in range(warm_up_steps + MEASURED_STEPS):
        if step == warm_up_steps:
            measured_from = Traffic.so_far(twins.engine)
        output_of = partial(output_of_path, schedule[step % period], step)
        twins.train(mean_square_of(output_of), f"the loss of step {step}")
        if evaluates:
            twins.compare_forward(output_of, f"the output after step {step}", AFTER_TRAINING)
        assert_released(twins.engine.module)
    twins.compare_weights()
    return Traffic.so_far(twins.engine) - measured_from


@distributed(world_size=(1, 2), timeout_s=60)
@pytest.mark.parametrize(
    "evaluates", [pytest.param(False, marks=pytest.mark.slow), True], ids=["train", "forward without grad between"]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_paths_in_turn_gather_no_more_than_each_alone(schedule: str, evaluates: bool, world_size: int) -> None:
    turns = SCHEDULES[schedule]
    alone = {path: traffic_of((path,), evaluates) for path in set(turns)}
    total = sum((alone[path] for path in turns), Traffic(0, 0, 0, 0))
    taken = traffic_of(turns, evaluates)
    share = 1 / len(turns)
    assert taken.gathers <= 1.1 * share * total.gathers
    assert taken.gathered_numel <= 1.1 * share * total.gathered_numel
    assert taken.discarded_numel <= 0.1 * share * total.gathered_numel
    if world_size > 1:
        assert total.gathers > 0
