"""Several engines over one model, none of them destroyed: a Trainer that evaluates before it trains, trl's reference
log-probabilities that are computed ahead, a Trainer that trains twice.

One of them takes care of the parameters, and all of them can be called.
"""

from __future__ import annotations

import copy

import deepspeed
import pytest
import torch
from torch import nn

from tests.comparisons import EXACT, PlainTrainer, Tolerance, assert_released
from tests.harness import distributed
from tests.models import build, token_ids, zero3_config

LR = 1e-2
CLOSE = Tolerance(rtol=1e-5, atol=1e-5)
GATHERS = pytest.mark.parametrize("gather", ["auto", "collective"])
MODELS = pytest.mark.parametrize("name", ["llama", "mixtral"])


class Side:
    """Engines over one model, and the same model in plain torch."""

    def __init__(self, name: str, gather: str) -> None:
        self.plain = build(name)
        self.model = copy.deepcopy(self.plain)
        self.gather = gather
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.seed = 0
        self.trainer: PlainTrainer | None = None

    def engine(self, module: nn.Module | None = None, lr: float | None = None) -> deepspeed.DeepSpeedEngine:
        config = zero3_config(gather=self.gather, lr=lr)
        return deepspeed.initialize(model=self.model if module is None else module, config=config)[0]

    def compare_forward(self, engine: deepspeed.DeepSpeedEngine, what: str, tolerance: Tolerance = CLOSE) -> None:
        ids = self._batches()[self.rank]
        with torch.no_grad():
            tolerance.check(engine(input_ids=ids).logits, self.plain(input_ids=ids).logits, what)

    def begin_training(self, module: nn.Module | None = None) -> deepspeed.DeepSpeedEngine:
        """An engine with a new optimizer, as plain torch gets one."""
        self.trainer = PlainTrainer(self.plain, lr=LR)
        return self.engine(module, lr=LR)

    def train(self, engine: deepspeed.DeepSpeedEngine, what: str) -> None:
        """One step."""
        assert self.trainer is not None
        batches = self._batches()
        ids = batches[self.rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        CLOSE.check(loss.detach(), self.trainer.step(batches)[self.rank], what)

    def _batches(self) -> list[torch.Tensor]:
        self.seed += 1
        return [token_ids(self.seed * self.world_size + rank) for rank in range(self.world_size)]


@distributed(world_size=(1, 2))
@MODELS
@GATHERS
def test_training_after_inference(name: str, gather: str) -> None:
    side = Side(name, gather)
    early = side.engine()
    side.compare_forward(early, "the first engine", EXACT)
    trained = side.begin_training()
    for step in range(2):
        side.train(trained, f"the second engine, the loss of step {step}")
    # The second one takes care of the parameters now; the first calls the same model.
    side.compare_forward(early, "the first engine after the second has trained")
    early.destroy()
    side.train(trained, "the second engine without the first")
    side.compare_forward(trained, "the second engine's output")
    if gather == "collective" and side.world_size > 1:
        assert_released(side.model)


@distributed(world_size=(1, 2))
@GATHERS
def test_inference_beside_training(gather: str) -> None:
    """An engine without an optimizer leaves the one that trains what it has."""
    side = Side("llama", gather)
    trained = side.begin_training()
    beside = side.engine()
    for step in range(2):
        side.compare_forward(beside, f"the engine that does not train, before step {step}")
        side.train(trained, f"the loss of step {step}")
    beside.destroy()
    side.compare_forward(trained, "the engine that trained")


@distributed(world_size=(1, 2))
@GATHERS
def test_training_twice(gather: str) -> None:
    side = Side("llama", gather)
    first = side.begin_training()
    for step in range(2):
        side.train(first, f"the first engine, the loss of step {step}")
    second = side.begin_training()
    for step in range(2):
        side.train(second, f"the second engine, the loss of step {step}")
    with pytest.raises(RuntimeError, match="step\\(\\) of an engine that has given up"):
        first.optimizer.step()
    first.destroy()
    side.train(second, "the second engine after the end of the first")


@distributed(world_size=2)
@GATHERS
def test_an_engine_around_a_part_of_the_model(gather: str) -> None:
    """As an engine around what a wrapper wraps, whichever comes first."""
    side = Side("llama", gather)
    whole = side.engine()
    part = side.engine(side.model.model)
    ids = token_ids(seed=50 + side.rank)
    with torch.no_grad():
        expected = side.plain.model(input_ids=ids).last_hidden_state
        EXACT.check(part(input_ids=ids).last_hidden_state, expected, "the inner engine")
    side.compare_forward(whole, "the outer engine", EXACT)
    trained = side.begin_training()
    side.train(trained, "an engine that trains both")
    with torch.no_grad():
        expected = side.plain.model(input_ids=ids).last_hidden_state
        CLOSE.check(part(input_ids=ids).last_hidden_state, expected, "the inner engine after a step")


@distributed(world_size=2)
def test_engines_that_have_only_some_parameters_in_common() -> None:
    side = Side("llama", "auto")
    side.engine()
    other = nn.Sequential(side.model.model.layers[0].mlp, nn.Linear(4, 4))
    with pytest.raises(ValueError, match="Destroy that engine before"):
        side.engine(other)


@distributed(world_size=(1, 2))
def test_fewer_persistent_parameters_than_in_an_earlier_engine() -> None:
    """What one engine kept whole, the next one need not."""
    side = Side("llama", "collective")
    for threshold in (100_000, 0):
        config = zero3_config(stage3_param_persistence_threshold=threshold)
        engine, *_ = deepspeed.initialize(model=side.model, config=config)
        side.compare_forward(engine, f"with threshold {threshold}", EXACT)
    if side.world_size > 1:
        assert_released(side.model)
        assert not any(p.ds_persist for p in side.model.parameters())
