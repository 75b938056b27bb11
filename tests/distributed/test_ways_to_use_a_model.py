"""Ways to write, call and copy a model that a hook, or the lack of one, could get wrong."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.comparisons import Tolerance, assert_released, assert_same_weights
from tests.distributed.twins import CLOSE, LR, Twins
from tests.harness import distributed
from tests.models import WEIGHT_DECAY, zero3_config
from tests.moe import HIDDEN, RoutedModel, hidden_states, seeded

STEPS = 3
LOSS = Tolerance(rtol=1e-4, atol=1e-4)


def linear() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN)


class ReturnsWhatItsChildReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.child = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.child(torch.tanh(x @ self.scale))
        return output


class ListOfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4) for _ in range(3))

    def forward(this, x: torch.Tensor) -> torch.Tensor:  # noqa: N805 (not every model calls it self)
        for weight in this.weights:
            x = torch.tanh(x @ weight)
        return x


class GathersAhead(nn.Module):
    """Gathers the parameter of a module that runs later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        gathered = (
            deepspeed.zero.GatheredParameters(self.later.weight)
            if hasattr(self.later.weight, "ds_id")
            else contextlib.nullcontext()
        )
        with gathered:
            scale = self.later.weight.detach().abs().mean().item()
        output: torch.Tensor = self.later(x * (1 + scale))
        return output


class Scaled(nn.Module):
    """Scales by a number, and by weights that do not lie in memory as they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter(torch.randn(HIDDEN, HIDDEN).t() / 4)
        self.cut = nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN)[:, :HIDDEN] / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.turned @ self.cut) * self.temperature


MODELS: dict[str, Callable[[], nn.Module]] = {
    "returns what its child returned": lambda: nn.Sequential(
        linear(), ReturnsWhatItsChildReturned(), ReturnsWhatItsChildReturned()
    ),
    "list of parameters": lambda: nn.Sequential(ListOfParameters(), linear()),
    "a number, and weights that are not contiguous": lambda: nn.Sequential(linear(), Scaled(), Scaled(), linear()),
    "gathers ahead": lambda: nn.Sequential(linear(), GathersAhead(), linear()),
    "transformer encoder": lambda: nn.Sequential(
        *(nn.TransformerEncoderLayer(HIDDEN, 2, 2 * HIDDEN, dropout=0.0, batch_first=True) for _ in range(2))
    ),
}


def output_of(step: int, model: Callable[..., Any], rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return output


def mean_square(step: int, model: Callable[..., Any], rank: int) -> torch.Tensor:
    return output_of(step, model, rank).square().mean()


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("prefetch_numel", [0, 300, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_training_with_evaluation(name: str, prefetch_numel: int) -> None:
    twins = Twins(seeded(MODELS[name]), zero3_config(lr=LR, stage3_prefetch_bucket_size=prefetch_numel))
    for step in range(STEPS):
        twins.compare_forward(partial(output_of, step), f"the output before step {step}", LOSS)
        assert_released(twins.engine.module)
        twins.train(partial(mean_square, step), f"the loss of step {step}", LOSS)
        assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("persistence_threshold", [0, 100_000])
def test_training_after_inference_mode(persistence_threshold: int) -> None:
    config = zero3_config(lr=LR, stage3_param_persistence_threshold=persistence_threshold)
    twins = Twins(seeded(partial(RoutedModel, top_k=4)), config)
    for step in range(STEPS):
        with torch.inference_mode():
            actual = output_of(step, twins.engine, 0)
            LOSS.check(actual, output_of(step, twins.plain, 0), f"the output before step {step}")
        twins.train(partial(mean_square, step), f"the loss of step {step}", LOSS)
    twins.compare_weights()


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_expert_that_only_an_earlier_micro_step_uses(clipping: float, rank: int, world_size: int) -> None:
    """With the optimizer on the host, gradients reach it at the last micro-step, which may bring none."""
    plain = seeded(RoutedModel)
    config = zero3_config(offload_optimizer={"device": "cpu", "pin_memory": False})
    config.update(gradient_accumulation_steps=2, gradient_clipping=clipping, zero_force_ds_cpu_optimizer=False)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, eps=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, eps=1e-3)
    for step in range(STEPS):
        for micro_step, chosen in enumerate([(0, 1), (2, 3)] if step % 2 else [(2, 3), (0, 1)]):
            for routed in (engine.module, plain):
                routed.route_to(chosen)
            number = 2 * step + micro_step
            loss = mean_square(number, engine, rank)
            engine.backward(loss)
            engine.step()
            for other in range(world_size):
                expected = mean_square(number, plain, other)
                (expected / (2 * world_size)).backward()
                if other == rank:
                    LOSS.check(loss.detach(), expected.detach(), f"the loss of step {step}, micro-step {micro_step}")
        if clipping:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clipping)
            LOSS.check(torch.as_tensor(float(engine.get_global_grad_norm())), norm, f"the norm of step {step}")
        plain_optimizer.step()
        plain_optimizer.zero_grad(set_to_none=False)


@distributed(world_size=(1, 2))
def test_copy_of_a_model_belongs_to_no_engine() -> None:
    twins = Twins(seeded(RoutedModel))
    twins.train(partial(mean_square, 0), "the loss", LOSS)
    duplicate = copy.deepcopy(twins.engine.module)
    assert type(duplicate.first._parameters) is dict
    twins.train(partial(mean_square, 1), "the loss after the copy", LOSS)
    twins.compare_weights()


@distributed(world_size=(1, 2))
def test_submodule_that_is_called_alone_and_raises() -> None:
    twins = Twins(seeded(RoutedModel))
    for step in range(2):
        with pytest.raises(RuntimeError), torch.no_grad():
            twins.engine.module.blocks[0](torch.zeros(2, HIDDEN + 1))
        twins.compare_forward(partial(output_of, step), f"the output after call {step}", CLOSE)
        assert_released(twins.engine.module)
        twins.train(partial(mean_square, step), f"the loss of step {step}", LOSS)
        assert_released(twins.engine.module)


@distributed(world_size=2, timeout_s=60)
def test_zero_init_as_the_first_thing_that_a_script_does(world_size: int) -> None:
    """Only torch's process group is there, as accelerate leaves it on CPUs; the batch size says how many ranks."""
    config = {**zero3_config(), "train_batch_size": world_size, "gradient_accumulation_steps": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deepspeed.comm.comm.cdb", None)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = linear()
        assert model.weight.ds_tensor.numel() == HIDDEN * HIDDEN // world_size


@distributed(world_size=2)
def test_all_ranks_begin_with_the_weights_of_the_first(rank: int) -> None:
    of_this_rank, of_the_first = (seeded(lambda: nn.Sequential(linear(), Scaled()), seed=seed) for seed in (rank, 0))
    engine, *_ = deepspeed.initialize(model=of_this_rank, config=zero3_config())
    assert_same_weights(engine.module, of_the_first)


@distributed(world_size=2)
def test_a_number_and_weights_that_are_not_contiguous_are_written_by_one_rank(rank: int) -> None:
    config = zero3_config()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(linear(), Scaled())
    wanted = seeded(lambda: nn.Sequential(linear(), Scaled()), seed=3)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if rank == 1:
            model.load_state_dict(wanted.state_dict())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert_same_weights(engine.module, wanted)
    CLOSE.check(engine(hidden_states(seed=rank)), wanted(hidden_states(seed=rank)), "the output")


@distributed(world_size=1)
def test_optimizer_of_another_model() -> None:
    model = seeded(linear)
    optimizer = torch.optim.AdamW([*model.parameters()])
    with pytest.raises(
        ValueError, match=r"2 of the 2 parameters in group 0 of the optimizer are not in the model \(Linear"
    ):
        deepspeed.initialize(model=copy.deepcopy(model), optimizer=optimizer, config=untested_config())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=untested_config())
    assert engine(hidden_states(seed=0)).shape[-1] == HIDDEN


def untested_config() -> dict[str, Any]:
    return {**zero3_config(), "zero_allow_untested_optimizer": True}
