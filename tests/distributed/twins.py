"""An engine and the same model in plain torch, run and trained in step, with every number compared on every rank."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import nn

from tests.comparisons import PlainTrainer, Tolerance, assert_same_weights
from tests.models import zero3_config

LR = 1e-2
CLOSE = Tolerance(rtol=1e-5, atol=1e-5)
WEIGHTS = Tolerance(rtol=1e-4, atol=LR / 100)
"""A weight that missed an update, or got a wrong one, is off by about ``LR``."""

LossOf = Callable[[Callable[..., Any], int], torch.Tensor]
"""From a model (the engine, or the plain one) and the number of a rank to the loss of that rank's data."""


def statistics_of(engine: deepspeed.DeepSpeedEngine) -> Any:
    """The counters of the engine's runtime. An engine without optimizer keeps its hooks where others keep theirs."""
    owner = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    return owner.param_coordinator.statistics


@dataclass(frozen=True)
class Traffic:
    """What the runtime has gathered: collectives, their elements, and those that were thrown away unused."""

    gathers: int
    gathered_numel: int
    discarded_numel: int
    rounds: int

    @classmethod
    def so_far(cls, engine: deepspeed.DeepSpeedEngine) -> Traffic:
        statistics = statistics_of(engine)
        return cls(**{field.name: getattr(statistics, field.name) for field in dataclasses.fields(cls)})

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(**{n: value - getattr(earlier, n) for n, value in dataclasses.asdict(self).items()})

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{n: value + getattr(other, n) for n, value in dataclasses.asdict(self).items()})


class Twins:
    """``plain`` and an engine around a copy of it. The engine trains with AdamW, unless the config names no
    optimizer."""

    def __init__(self, plain: nn.Module, config: dict[str, Any] | None = None) -> None:
        self.plain = plain
        self.engine, *_ = deepspeed.initialize(model=copy.deepcopy(plain), config=config or zero3_config(lr=LR))
        self.trainer = PlainTrainer(plain, lr=LR)
        self._rank = torch.distributed.get_rank()
        self._world_size = torch.distributed.get_world_size()
        self._accumulation: int = self.engine.gradient_accumulation_steps()

    def compare_forward(self, output_of: LossOf, what: str, tolerance: Tolerance = CLOSE) -> None:
        """Compare this rank's output, without grad."""
        with torch.no_grad():
            actual = output_of(self.engine, self._rank)
            tolerance.check(actual, output_of(self.plain, self._rank), what)

    def train(self, loss_of: LossOf, what: str, tolerance: Tolerance = CLOSE) -> None:
        """One update, of one micro-step."""
        self.train_on([loss_of], what, tolerance)

    def train_on(self, micro_steps: list[LossOf], what: str, tolerance: Tolerance = CLOSE) -> None:
        """One update of as many micro-steps as the engine accumulates, comparing each of this rank's losses."""
        assert len(micro_steps) == self._accumulation
        losses = []
        for loss_of in micro_steps:
            loss = loss_of(self.engine, self._rank)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        ranks = range(self._world_size)
        expected = self.trainer.step_on([partial(loss_of, self.plain, r) for loss_of in micro_steps for r in ranks])
        for number, loss in enumerate(losses):
            tolerance.check(loss, expected[number * self._world_size + self._rank], f"{what}, micro-step {number}")

    def compare_weights(self) -> None:
        assert_same_weights(self.engine.module, self.plain, WEIGHTS)
