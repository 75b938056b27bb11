"""Ranks that come apart: one skips a batch, raises, ends, steps early, or goes on longer than the others.

Whatever happened, each rank that lives either got right values or, in time, a ``LockstepError`` that says who waits
where; never a wrong number, never a hang. Calls count in their order: the runtime cannot know that the fourth forward
of one rank was meant for the same data as the fifth of another, so the n-th update of one rank is the n-th of all.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from tests.comparisons import Tolerance
from tests.distributed.twins import LR, Twins
from tests.harness import distributed
from tests.models import zero3_config
from tests.moe import RoutedModel, hidden_states, seeded

LOCKSTEP_TIMEOUT_S = 1.5
GRACE_S = 5.0
"""How much later than its limit the error may come: a look at the clock, a message, a busy machine."""
TIMEOUT_S = 40.0
ODD_RANK = 1
"""The rank that does something else. Rank 0 holds the group's store, and the test needs that to the end."""
EXPERTS = (0, 1)
BROKEN_MODULE = "blocks.1.experts.0"
LOSS = Tolerance(rtol=1e-4, atol=1e-4)


class Interrupted(Exception):
    """Raised by user code in the middle of a pass."""


class Break(enum.Enum):
    """What happens in the middle of a turn, inside the module ``BROKEN_MODULE``."""

    RAISES_IN_FORWARD = "raises in forward"
    RAISES_IN_BACKWARD = "raises in backward"
    EXITS_IN_FORWARD = "exits in forward"
    EXITS_IN_BACKWARD = "exits in backward"

    @property
    def in_backward(self) -> bool:
        return self in (Break.RAISES_IN_BACKWARD, Break.EXITS_IN_BACKWARD)

    @property
    def exits(self) -> bool:
        return self in (Break.EXITS_IN_FORWARD, Break.EXITS_IN_BACKWARD)


@dataclass(frozen=True)
class Turn:
    """One pass over a batch: a forward and, in training, a backward and a step. Without a batch, a step alone."""

    batch: int | None
    breaks: Break | None = None


@dataclass(frozen=True)
class Scenario:
    """What the odd rank does, and what all others do at the same time."""

    odd: tuple[Turn, ...]
    others: tuple[Turn, ...]

    def turns_of(self, rank: int) -> tuple[Turn, ...]:
        return self.odd if rank == ODD_RANK else self.others

    @property
    def exits(self) -> bool:
        return any(turn.breaks is not None and turn.breaks.exits for turn in self.odd)

    @property
    def ends_in_the_middle(self) -> bool:
        """Whether the odd rank is last seen inside the model. If it goes on, the ranks may meet between two passes."""
        return self.odd[-1].breaks is not None

    @property
    def needs_training(self) -> bool:
        """Whether it has no meaning for forwards alone."""
        return any(turn.batch is None or (turn.breaks is not None and turn.breaks.in_backward) for turn in self.odd)


THREE = (Turn(0), Turn(1), Turn(2))
SCENARIOS = {
    "skips a batch": Scenario(odd=(Turn(0), Turn(2)), others=THREE),
    "runs an extra batch": Scenario(odd=(*THREE, Turn(3)), others=THREE),
    "raises in forward, goes on": Scenario((Turn(0), Turn(1, Break.RAISES_IN_FORWARD), Turn(2)), THREE),
    "raises in forward, leaves": Scenario((Turn(0), Turn(1, Break.RAISES_IN_FORWARD)), THREE),
    "raises in forward, makes up for it": Scenario(
        (Turn(0), Turn(1, Break.RAISES_IN_FORWARD), Turn(1), Turn(2)), THREE
    ),
    "raises in backward, goes on": Scenario((Turn(0), Turn(1, Break.RAISES_IN_BACKWARD), Turn(2)), THREE),
    "raises in backward, leaves": Scenario((Turn(0), Turn(1, Break.RAISES_IN_BACKWARD)), THREE),
    "exits in forward": Scenario((Turn(0), Turn(1, Break.EXITS_IN_FORWARD)), THREE),
    "exits in backward": Scenario((Turn(0), Turn(1, Break.EXITS_IN_BACKWARD)), THREE),
    "steps early": Scenario((Turn(0), Turn(None), Turn(1)), (Turn(0), Turn(1))),
}
LIVING = {name: scenario for name, scenario in SCENARIOS.items() if not scenario.exits}
DEADLY = {name: scenario for name, scenario in SCENARIOS.items() if scenario.exits}


@dataclass(frozen=True)
class SeenLoss:
    """A loss (in evaluation, the mean square of an output) that a forward gave."""

    batch: int
    after_updates: int
    value: float


@dataclass
class Record:
    """What a rank did and saw once the ranks could come apart. Every rank gets to see every record."""

    losses: list[SeenLoss] = field(default_factory=list)
    entered_updates: list[int | None] = field(default_factory=list)
    """The batch behind the gradient of each update that was begun; None for an update without a gradient."""
    completed_updates: int = 0
    error: str | None = None
    took_s: float = 0.0

    def publish(self, prefix: object, rank: int) -> None:
        _get_default_store().set(f"{prefix} {rank}", pickle.dumps(self))

    @staticmethod
    def of(prefix: object, rank: int) -> Record:
        """Waits until the rank has published it."""
        record: Record = pickle.loads(_get_default_store().get(f"{prefix} {rank}"))
        return record


def loss_of_batch(batch: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=100 * batch + rank))
    return output.square().mean()


def make_twins(train: bool, **zero: object) -> Twins:
    def build() -> nn.Module:
        model = RoutedModel(layers=2, experts=len(EXPERTS))
        model.route_to(EXPERTS)
        return model

    config = zero3_config(lr=LR if train else None, stage3_lockstep_timeout_s=LOCKSTEP_TIMEOUT_S, **zero)
    return Twins(seeded(build), config)


@contextlib.contextmanager
def broken_by(breaks: Break | None, module: nn.Module, before_exit: Callable[[], None]) -> Iterator[None]:
    """While inside, the module does what ``breaks`` says."""

    def happen(*_: object) -> None:
        assert breaks is not None
        if breaks.exits:
            before_exit()
            os._exit(0)
        raise Interrupted

    def happen_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(happen)

    if breaks is None:
        yield
        return
    hook = (
        module.register_forward_hook(happen_in_backward)
        if breaks.in_backward
        else module.register_forward_pre_hook(happen)
    )
    try:
        yield
    finally:
        hook.remove()


class Run:
    """One rank's part in a scenario."""

    def __init__(self, twins: Twins, train: bool, rank: int, shared_dir: Path) -> None:
        self._twins = twins
        self._train = train
        self._rank = rank
        self._prefix = shared_dir
        self.record = Record()

    def in_step(self, steps: int) -> None:
        """Turns that all ranks take alike, so that the runtime knows the model's order."""
        for step in range(steps):
            loss_of = partial(loss_of_batch, 1000 + step)
            if self._train:
                self._twins.train(loss_of, f"the loss of step {step}, before the ranks came apart")
            else:
                self._twins.compare_forward(loss_of, f"the output of forward {step}, before the ranks came apart")

    def apart(self, turns: tuple[Turn, ...]) -> None:
        """Take the turns until the runtime says that the ranks are not in step."""
        from deepspeed.runtime.zero.lockstep import LockstepError

        started_s = time.monotonic()
        try:
            for turn in turns:
                self._take(turn)
        except LockstepError as error:
            self.record.error = str(error)
        self.record.took_s = time.monotonic() - started_s
        self.record.publish(self._prefix, self._rank)

    def _take(self, turn: Turn) -> None:
        engine = self._twins.engine
        module = engine.module.get_submodule(BROKEN_MODULE)
        with contextlib.suppress(Interrupted), broken_by(turn.breaks, module, self._publish):
            if turn.batch is not None:
                with torch.set_grad_enabled(self._train):
                    loss = loss_of_batch(turn.batch, engine, self._rank)
                self.record.losses.append(SeenLoss(turn.batch, self.record.completed_updates, loss.item()))
                if self._train:
                    engine.backward(loss)
            if self._train:
                self._step(turn)
            return
        # The turn was interrupted: drop what it has left of gradients, as a training loop that goes on would.
        if self._train:
            engine.zero_grad()
            engine.optimizer.zero_grad()

    def _step(self, turn: Turn) -> None:
        from deepspeed.runtime.zero.lockstep import LockstepError

        self.record.entered_updates.append(turn.batch)
        try:
            self._twins.engine.step()
        except LockstepError:
            raise
        except RuntimeError as error:
            # A step that no backward came before may be refused, if the error says so: then nothing was updated.
            if turn.batch is not None or "backward" not in str(error):
                raise
            self.record.entered_updates.pop()
        else:
            self.record.completed_updates += 1

    def _publish(self) -> None:
        self.record.publish(self._prefix, self._rank)

    def compare(self, records: list[Record]) -> None:
        """Every value that any rank got, against plain torch on the batches that the updates were made of."""
        updates = max(record.completed_updates for record in records)
        for done in range(updates + 1):
            for rank, record in enumerate(records):
                for seen in record.losses:
                    if seen.after_updates == done:
                        expected = loss_of_batch(seen.batch, self._twins.plain, rank).detach()
                        LOSS.check(torch.tensor(seen.value), expected, f"rank {rank}: {seen}")
            if done < updates:
                entered = [record.entered_updates[done : done + 1] for record in records]
                assert all(entered), f"update {done} was completed, but not every rank has begun it: {records}"
                self._twins.trainer.step_on([self._loss_behind(batch, r) for r, (batch,) in enumerate(entered)])

    def _loss_behind(self, batch: int | None, rank: int) -> Callable[[], torch.Tensor]:
        if batch is not None:
            return partial(loss_of_batch, batch, self._twins.plain, rank)
        return lambda: torch.zeros((), requires_grad=True)


REMEDY = r"stage3_lockstep_timeout_s|set_z3_leaf_module"
"""What to set or to call. The error may say more, in words of its own."""


def check_error(text: str, model: nn.Module, world_size: int, *, in_the_middle: bool) -> None:
    """The error names each rank, what to do and, if ranks came apart in the middle of the model, where a rank waits."""
    for rank in range(world_size):
        assert re.search(rf"(?i)\branks?\b[^.\n]*\b{rank}\b", text), f"rank {rank} is not named: {text}"
    assert re.search(REMEDY, text), f"no remedy: {text}"
    if in_the_middle:
        paths = [name for name, _ in model.named_modules() if name]
        assert any(re.search(rf"(?<![\w.]){re.escape(path)}\b", text) for path in paths), f"no module is named: {text}"


def check_scenario(
    scenario: Scenario, train: bool, in_step: int, rank: int, world_size: int, shared_dir: Path
) -> list[Record]:
    run = Run(twins := make_twins(train), train, rank, shared_dir)
    run.in_step(in_step)
    run.apart(scenario.turns_of(rank))
    records = [Record.of(shared_dir, r) for r in range(world_size)]
    run.compare(records)
    mine = run.record
    if mine.error is not None:
        check_error(mine.error, twins.engine.module, world_size, in_the_middle=scenario.ends_in_the_middle)
        assert mine.took_s <= LOCKSTEP_TIMEOUT_S + GRACE_S, f"the error came after {mine.took_s:.1f} s: {mine.error}"
    return records


def check_that_work_goes_on(train: bool) -> None:
    """A new engine works on all ranks."""
    twins = make_twins(train)
    twins.compare_forward(partial(loss_of_batch, 0), "the output of a new engine")
    if train:
        twins.train(partial(loss_of_batch, 1), "the loss of a new engine")
        twins.compare_weights()


EVAL_OR_TRAIN = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
IN_STEP = pytest.mark.parametrize("in_step", [0, 5], ids=["at once", "after 5 equal steps"])


def skip_without_meaning(scenario: Scenario, train: bool) -> None:
    if scenario.needs_training and not train:
        pytest.skip("concerns training only")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@IN_STEP
@EVAL_OR_TRAIN
@pytest.mark.parametrize("name", LIVING)
def test_one_of_two_ranks(name: str, train: bool, in_step: int, rank: int, world_size: int, shared_dir: Path) -> None:
    skip_without_meaning(LIVING[name], train)
    check_scenario(LIVING[name], train, in_step, rank, world_size, shared_dir)
    check_that_work_goes_on(train)


@distributed(world_size=3, timeout_s=TIMEOUT_S)
@EVAL_OR_TRAIN
@pytest.mark.parametrize("name", LIVING)
def test_one_of_three_ranks(name: str, train: bool, rank: int, world_size: int, shared_dir: Path) -> None:
    skip_without_meaning(LIVING[name], train)
    check_scenario(LIVING[name], train, 5, rank, world_size, shared_dir)
    check_that_work_goes_on(train)


@distributed(world_size=2, timeout_s=TIMEOUT_S, mortal_ranks=(ODD_RANK,))
@IN_STEP
@EVAL_OR_TRAIN
@pytest.mark.parametrize("name", DEADLY)
def test_one_of_two_ranks_ends(
    name: str, train: bool, in_step: int, rank: int, world_size: int, shared_dir: Path
) -> None:
    skip_without_meaning(DEADLY[name], train)
    records = check_scenario(DEADLY[name], train, in_step, rank, world_size, shared_dir)
    assert records[0].error is not None or not train


@distributed(world_size=3, timeout_s=TIMEOUT_S, mortal_ranks=(ODD_RANK,))
@EVAL_OR_TRAIN
@pytest.mark.parametrize("name", DEADLY)
def test_one_of_three_ranks_ends(name: str, train: bool, rank: int, world_size: int, shared_dir: Path) -> None:
    skip_without_meaning(DEADLY[name], train)
    records = check_scenario(DEADLY[name], train, 5, rank, world_size, shared_dir)
    assert not train or (records[0].error is not None and records[2].error is not None)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@EVAL_OR_TRAIN
def test_rank_that_leaves_is_missed_in_time(train: bool, rank: int, shared_dir: Path) -> None:
    """A rank ends its loop in the ordinary way; whoever needs it later is told so, and not before the limit."""
    run = Run(twins := make_twins(train), train, rank, shared_dir)
    run.in_step(5)
    run.apart((Turn(0),) if rank == ODD_RANK else (Turn(0), Turn(1)))
    records = [Record.of(shared_dir, r) for r in range(2)]
    run.compare(records)
    assert records[ODD_RANK].error is None
    if records[0].error is not None:
        assert records[0].took_s >= 0.9 * LOCKSTEP_TIMEOUT_S
    if rank == 0 and run.record.error is not None:
        check_error(run.record.error, twins.engine.module, world_size=2, in_the_middle=False)
    check_that_work_goes_on(train)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@IN_STEP
def test_engine_goes_on_after_a_rank_was_too_late(in_step: int, rank: int, shared_dir: Path) -> None:
    """In the middle of a forward whose gathers were agreed on: both get an error, and the next forward is right."""
    from deepspeed.runtime.zero.lockstep import LockstepError

    twins = make_twins(train=False, stage3_prefetch_bucket_size=0)
    for step in range(in_step):
        twins.compare_forward(partial(loss_of_batch, step), f"the output of forward {step}")
    middle = twins.engine.module.get_submodule(BROKEN_MODULE)

    def wait_for_rank_0(*_: object) -> None:
        if rank == ODD_RANK:
            _get_default_store().get(f"{shared_dir} rank 0 gave up")

    late = middle.register_forward_pre_hook(wait_for_rank_0)
    with torch.no_grad(), pytest.raises(LockstepError, match="rank 1"):
        if rank == ODD_RANK:
            loss_of_batch(7, twins.engine, rank)
        else:
            try:
                loss_of_batch(7, twins.engine, rank)
            finally:
                _get_default_store().set(f"{shared_dir} rank 0 gave up", "")
    late.remove()
    for step in range(3):
        twins.compare_forward(partial(loss_of_batch, 8 + step), f"the output of forward {step} after the error")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@IN_STEP
@EVAL_OR_TRAIN
def test_rank_that_is_merely_late_is_waited_for(in_step: int, train: bool, rank: int, shared_dir: Path) -> None:
    run = Run(twins := make_twins(train), train, rank, shared_dir)
    run.in_step(in_step)
    if rank == ODD_RANK:
        # Not to wait for anybody: this is the slowness under test, such as that of a slow data loader.
        middle = twins.engine.module.get_submodule(BROKEN_MODULE)
        middle.register_forward_pre_hook(lambda *_: time.sleep(LOCKSTEP_TIMEOUT_S / 3))
        time.sleep(LOCKSTEP_TIMEOUT_S / 3)
    run.apart((Turn(0), Turn(1)))
    records = [Record.of(shared_dir, r) for r in range(2)]
    assert [record.error for record in records] == [None, None]
    run.compare(records)
    assert len(run.record.losses) == 2
