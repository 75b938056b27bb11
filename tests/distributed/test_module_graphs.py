"""Random module graphs, budgets and steps: ZeRO-3 gives what plain torch gives, and leaves nothing behind.

hypothesis draws the programs in pytest's process, so that it can shrink them; each is one run of a pool of ranks. A
failure prints the program as source: paste it into ``FOUND`` to keep it.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import deepspeed
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.comparisons import Tolerance, assert_released
from tests.harness import DistributedFailure, RankPools
from tests.models import ADAM_EPS, WEIGHT_DECAY
from tests.module_graphs import (
    EVERYTHING,
    Borrower,
    Branch,
    Budgets,
    Chain,
    Checkpointed,
    Dense,
    Experts,
    Fault,
    GraphModel,
    Mlp,
    Mode,
    Pair,
    Place,
    PlannedFault,
    Program,
    Scope,
    Situation,
    Step,
    Tied,
    programs,
    required_numel,
    source,
)

WORLD_SIZES = (1, 2)
QUICK_EXAMPLES = 60
SLOW_EXAMPLES = 2_500
TIMEOUT_S = 60.0
"""Some hundred times what a program takes, since the first one of a pool waits for what DeepSpeed imports late."""
LOCKSTEP_TIMEOUT_S = 5.0
ADAM_LR = 1e-2
SGD_LR = 0.5
SGD_MOMENTUM = 0.5
CLOSE = Tolerance(rtol=1e-4, atol=1e-4)
"""Gradients are averaged in another order, and the steps that follow from them grow the difference. A wrong gradient
of a program changes its weights by more than a hundred times that."""

STATIC = Scope(containers=("tensor", "tuple", "list", "dict"), min_width=1, one_way=True, faults=False, starved=False)
"""Models whose control flow never changes."""

_NO_INPUT_GRAD = tuple(Situation(seed=seed, input_grad=False) for seed in (1, 2))
FOUND: dict[str, Program] = {
    "leaf that returns what came before it": Program(
        (Mlp(), Branch(flag=0, taken=0), Dense(), Chain(leaf=True, children=(1,)), Chain(children=(2, 3))),
    ),
    "reentrant checkpoint inside a module with a parameter of its own": Program(
        (Mlp(), Checkpointed(child=0, reentrant=True), Dense(), Chain(children=(2, 1, 2), gain=True)),
    ),
    "experts that one rank used and then none": Program(
        (Mlp(), Experts(experts=(0,))),
        steps=(
            Step(ranks=(Situation(), Situation(routes=()))),
            Step(ranks=(Situation(routes=()), Situation(routes=()))),
        ),
    ),
    "output in a dict with keys that are no names": Program((Dense(gives="numbered dict"),)),
    "parameter without elements": Program((Dense(width=0),)),
    "two parameters without elements after one with": Program(
        (Dense(width=3), Dense(width=0, bias=True), Chain(children=(0, 1, 1)))
    ),
    "tied weight and an input without grad": Program(
        (Dense(bias=True), Tied(to=0), Chain(children=(0, 1))),
        Budgets(prefetch_numel=30, reuse_distance_numel=10_000),
        steps=(Step(ranks=_NO_INPUT_GRAD),),
    ),
    "forward without grad that follows a training step": Program(
        (Mlp(width=2, frozen_up=True), Chain(children=(0,))),
        Budgets(reuse_distance_numel=100),
        steps=(Step(), Step(Mode.EVAL)),
    ),
    "leaf that takes a keyword, run twice, once for nothing": Program(
        (
            Dense(takes="dict", gives="tuple", keyword=True, leaf=True, width=2, bias=True),
            Pair(first=0, second=0, second_used=False),
            Dense(),
            Chain(children=(1, 2)),
        ),
        Budgets(persistence_threshold_numel=8),
        adam=True,
    ),
    "experts of which other ones run in each step and on each rank": Program(
        (Dense(), Dense(width=2), Mlp(), Experts(experts=(0, 1, 2), gain=True)),
        Budgets(prefetch_numel=100),
        steps=tuple(
            Step(ranks=(Situation(seed=n, routes=(n, n + 1)), Situation(seed=n + 9, routes=(2 - n,)))) for n in range(3)
        ),
    ),
    "exception in a backward that has accumulated some gradients": Program(
        (Dense(), Mlp(), Chain(children=(0, 1))),
        steps=(Step(fault=Fault(0, Place.BACKWARD)), Step(), Step()),
    ),
    "frozen module under a checkpoint": Program(
        (Dense(width=6, frozen=True), Checkpointed(child=0), Dense(), Chain(children=(1, 2))),
        Budgets(prefetch_numel=30, persistence_threshold_numel=8),
    ),
    "shared leaf that only one rank uses more often": Program(
        (Mlp(leaf=True, width=5, frozen_up=True), Chain(children=(0, 0, 0)), Experts(experts=(1,))),
        Budgets(prefetch_numel=100, reduce_bucket_numel=100),
        steps=(Step(ranks=(Situation(routes=(1,)), Situation(routes=()))), Step()),
    ),
    "shared module in a leaf, on one rank only": Program(
        (
            Mlp(width=3, frozen_up=True),
            Branch(leaf=True, flag=1, taken=0),
            Pair(first=0, second=0, second_used=False),
            Chain(children=(2, 1)),
        ),
        steps=(Step(ranks=(Situation(flags=(False, True)), Situation())),),
    ),
    "module used in a reentrant checkpoint and outside of it": Program(
        (Dense(width=4), Checkpointed(child=0, reentrant=True), Chain(children=(1, 0))),
    ),
    "borrowed weight of a leaf": Program(
        (Dense(leaf=True, width=8, bias=True), Borrower(lender=0), Chain(children=(1,), gain=True)),
        Budgets(prefetch_numel=30, live_slack_numel=0, persistence_threshold_numel=8),
        steps=(Step(), Step(Mode.EVAL), Step(), Step(Mode.EVAL)),
    ),
    "exception in a forward and in a backward": Program(
        (Dense(width=2), Mlp(), Chain(children=(0, 1, 0))),
        Budgets(prefetch_numel=100),
        steps=(Step(), Step(fault=Fault(1)), Step(), Step(fault=Fault(1, Place.BACKWARD)), Step()),
    ),
}
"""Programs that failed once."""


def from_settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        # A failure prints the blob that reproduces it, and its program; a database would be one more thing to keep.
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        # The fixture is the session's pools: nothing of an example stays in it.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


class ProgramFailed(AssertionError):
    """What a program is, and what each rank says of its run."""


def check(pools: RankPools, world_size: int, program: Program) -> None:
    try:
        pools[world_size].run(run_program, program, timeout_s=TIMEOUT_S)
    except DistributedFailure as failure:
        text = f"on {world_size} rank(s):\n\n{source(program)}\n\n{failure}"
    else:
        return
    raise ProgramFailed(text)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@from_settings(QUICK_EXAMPLES // 3)
@given(program=programs(STATIC))
def test_static_graphs(rank_pools: RankPools, world_size: int, program: Program) -> None:
    check(rank_pools, world_size, program)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@from_settings(QUICK_EXAMPLES)
@given(program=programs(EVERYTHING))
def test_random_graphs(rank_pools: RankPools, world_size: int, program: Program) -> None:
    check(rank_pools, world_size, program)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@from_settings(SLOW_EXAMPLES)
@given(program=programs(EVERYTHING))
def test_many_random_graphs(rank_pools: RankPools, world_size: int, program: Program) -> None:
    check(rank_pools, world_size, program)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FOUND)
def test_found(rank_pools: RankPools, world_size: int, name: str) -> None:
    check(rank_pools, world_size, FOUND[name])


# -- what runs on each rank --


def ds_config(budgets: Budgets, gather: str, model: GraphModel) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": budgets.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": budgets.prefetch_numel,
            "stage3_max_live_parameters": budgets.max_live_numel(model),
            "stage3_max_reuse_distance": budgets.reuse_distance_numel,
            "stage3_param_persistence_threshold": budgets.persistence_threshold_numel,
            "stage3_lockstep_timeout_s": LOCKSTEP_TIMEOUT_S,
            "stage3_gather": gather,
            "reduce_bucket_size": budgets.reduce_bucket_numel,
        },
    }


def optimizer_for(program: Program, model: GraphModel) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if program.adam:
        return torch.optim.AdamW(trained, lr=ADAM_LR, weight_decay=WEIGHT_DECAY, eps=ADAM_EPS)
    return torch.optim.SGD(trained, lr=SGD_LR, momentum=SGD_MOMENTUM, weight_decay=WEIGHT_DECAY)


def run_program(program: Program, rank: int) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    plain = PlainTwin(program, world_size)
    sharded = ShardedTwin(program, plain.model)
    # After whatever happened, an ordinary forward works, and leaves nothing behind.
    closing = Step(Mode.EVAL, program.steps[0].ranks)
    for number, step in enumerate((*program.steps, closing)):
        expected = plain.run(step, rank)
        actual = sharded.run(step, step.ranks[rank])
        assert actual.keys() == expected.keys()
        for what, value in actual.items():
            CLOSE.check(value, expected[what], f"{what} of step {number}")
        if plain.updated:
            sharded.assert_weights_equal(plain.model, f"after step {number}")
    sharded.assert_nothing_left_behind()
    sharded.engine.destroy()


class PlainTwin:
    """Data-parallel training of the program's model in one process, without DeepSpeed: one pass for each rank."""

    def __init__(self, program: Program, world_size: int) -> None:
        self.model = GraphModel(program)
        self.updated = False
        """Whether the last step changed the weights."""
        self._optimizer = optimizer_for(program, self.model)
        self._accumulation = program.budgets.accumulation
        self._accumulated = 0
        self._world_size = world_size

    def run(self, step: Step, rank: int) -> dict[str, torch.Tensor]:
        """The step on all ranks; what it gives on this one."""
        self.updated = False
        results = [self._run_as(situation, step) for situation in step.ranks[: self._world_size]]
        if step.fault is not None:
            if step.fault.place is Place.BACKWARD:
                self._optimizer.zero_grad()
        elif step.mode is Mode.TRAIN:
            self._accumulated += 1
            if self._accumulated % self._accumulation == 0:
                self._update()
        return results[rank]

    def _run_as(self, situation: Situation, step: Step) -> dict[str, torch.Tensor]:
        x = situation.input()
        with self.model.control.during(situation, step.fault):
            if step.fault is not None:
                with pytest.raises(PlannedFault), torch.set_grad_enabled(step.mode is not Mode.EVAL):
                    (self.model(x).square().mean() / self._accumulation / self._world_size).backward()
                return {}
            with torch.set_grad_enabled(step.mode is not Mode.EVAL):
                output = self.model(x)
                results = {"the output": output.detach()}
            if step.mode is Mode.TRAIN:
                loss = output.square().mean() / self._accumulation
                (loss / self._world_size).backward()
                if x.grad is not None:
                    results["the gradient of the input"] = x.grad * self._world_size
        return results

    def _update(self) -> None:
        """A parameter without gradient counts as having gradient zero: its momentum and decay still move it."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.updated = True


class ShardedTwin:
    """The same under ZeRO-3, one rank of it."""

    def __init__(self, program: Program, plain: GraphModel) -> None:
        model = copy.deepcopy(plain)
        for leaf in model.leaves():
            deepspeed.utils.set_z3_leaf_module(leaf, True)
        budgets = program.budgets
        self._required_numel = required_numel(model, budgets.persistence_threshold_numel)
        self._max_live_numel = budgets.max_live_numel(model)
        config = ds_config(budgets, program.gather, model)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_for(program, model), config=config)
        self._control = self.engine.module.control

    def run(self, step: Step, situation: Situation) -> dict[str, torch.Tensor]:
        """What the step gives on this rank. What a planned fault leaves is put away as a user would do it."""
        x = situation.input()
        self.engine.train(step.mode is not Mode.EVAL)
        with self._control.during(situation, step.fault):
            if step.fault is not None:
                self._run_into(step, step.fault, x)
                return {}
            with torch.set_grad_enabled(step.mode is not Mode.EVAL):
                output = self.engine(x)
                results = {"the output": output.detach()}
            if step.mode is Mode.EVAL:
                self.assert_nothing_left_behind()
            if step.mode is Mode.TRAIN:
                self.engine.backward(output.square().mean())
                self.assert_nothing_left_behind()
                if x.grad is not None:
                    results["the gradient of the input"] = x.grad
                self.engine.step()
        return results

    def assert_nothing_left_behind(self) -> None:
        assert_released(self.engine.module)
        statistics = self.engine.optimizer.parameter_offload.param_coordinator.statistics
        assert statistics.live_numel == 0, f"expected no live elements after the step, got {statistics}"
        if self._required_numel <= self._max_live_numel:
            assert statistics.peak_live_numel <= self._max_live_numel, (
                f"expected at most {self._max_live_numel} live elements, got {statistics}"
            )

    def assert_weights_equal(self, plain: GraphModel, when: str) -> None:
        expected = dict(plain.named_parameters())
        for name, parameter in self.engine.module.named_parameters():
            # One at a time: the budget of live elements may hold no more.
            with deepspeed.zero.GatheredParameters(parameter):
                CLOSE.check(parameter.data, expected[name].data, f"{name} {when}")

    def _run_into(self, step: Step, fault: Fault, x: torch.Tensor) -> None:
        with pytest.raises(PlannedFault), torch.set_grad_enabled(step.mode is not Mode.EVAL):
            self.engine.backward(self.engine(x).square().mean())
        if fault.place is Place.BACKWARD:
            self.engine.optimizer.zero_grad()
