"""Loops that mix what engines can do: several of them in one process, states moved to the host, no_sync."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn
from transformers import PreTrainedModel

from tests.comparisons import EXACT, PlainTrainer, Tolerance, assert_released, assert_same_weights
from tests.harness import distributed
from tests.models import HIDDEN, build, token_ids, zero3_config

LR = 1e-2
STEPS = 3
TIMEOUT_S = 120.0
LOSS = Tolerance(rtol=1e-4, atol=1e-4)
WEIGHTS = Tolerance(rtol=1e-3, atol=LR / 20)

GATHER = pytest.mark.parametrize("gather", ["collective", "auto"])
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, eps=1e-3),
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, eps=1e-1, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, eps=1e-1),
}


class PartlyFrozen(nn.Module):
    """Two groups of parameters that are not in the order of the model, and frozen ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN)
        self.frozen.requires_grad_(False)
        self.second = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.tanh(self.frozen(torch.tanh(self.first(hidden)))))
        return output

    def groups(self) -> list[dict[str, Any]]:
        biases = [self.first.bias, self.second.bias]
        return [{"params": biases, "lr": 2 * LR}, {"params": [self.second.weight, self.first.weight], "lr": LR}]


def seeded(build_model: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model()


def mean_square(model: Callable[..., torch.Tensor], number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return model(torch.randn(4, HIDDEN, generator=generator)).square().mean()


class Pair:
    """An engine and plain torch, with an optimizer of torch's."""

    def __init__(self, optimizer: str, gather: str = "collective") -> None:
        self.plain = seeded(PartlyFrozen)
        model = copy.deepcopy(self.plain)
        config = {**zero3_config(gather=gather, sub_group_size=500), "zero_allow_untested_optimizer": True}
        make = OPTIMIZERS[optimizer]
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=make(model.groups()), config=config)
        self.optimizer = make(self.plain.groups())
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def backward(self, number: int) -> None:
        loss = mean_square(self.engine, number, self.rank)
        self.engine.backward(loss)
        expected = [mean_square(self.plain, number, rank) for rank in range(self.ranks)]
        (sum(expected, torch.zeros(())) / self.ranks).backward()
        LOSS.check(loss.detach(), expected[self.rank].detach(), f"the loss of backward {number}")

    def step(self) -> None:
        self.engine.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert_same_weights(self.engine.module, self.plain, WEIGHTS)
        EXACT.check(*self.frozen(), "the frozen weights")

    def frozen(self) -> tuple[torch.Tensor, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(self.engine.module.frozen.parameters())):
            return self.engine.module.frozen.weight.data.clone(), self.plain.frozen.weight.data


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@GATHER
@pytest.mark.parametrize(
    ("optimizer", "include"),
    [
        *((name, None) for name in OPTIMIZERS),
        *(("AdamW", states) for states in (["optim_states"], ["hp_params", "lp_params"], ["lp_grads"])),
    ],
    ids=str,
)
def test_states_on_the_host_and_back(optimizer: str, include: list[str] | None, gather: str) -> None:
    pair = Pair(optimizer, gather)
    for number in range(STEPS):
        pair.backward(number)
        pair.step()
        states = None if include is None else [OffloadStateTypeEnum(name) for name in include]
        pair.engine.offload_states(include=states, pin_memory=number != 1)
        pair.engine.reload_states()
        assert_same_weights(pair.engine.module, pair.plain, WEIGHTS)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_checkpoint_after_states_were_on_the_host(optimizer: str, shared_dir: Path) -> None:
    pair = Pair(optimizer)
    pair.backward(0)
    pair.step()
    pair.engine.offload_states()
    pair.engine.reload_states()
    pair.engine.save_checkpoint(str(shared_dir))
    other = Pair(optimizer)
    other.engine.load_checkpoint(str(shared_dir))
    other.plain, other.optimizer = pair.plain, pair.optimizer
    for number in range(1, STEPS):
        other.backward(number)
        other.step()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@GATHER
def test_no_sync(gather: str) -> None:
    """Gradients add up as without it."""
    pair = Pair("AdamW", gather)
    for number in range(STEPS):
        with pair.engine.no_sync():
            pair.backward(3 * number)
            pair.backward(3 * number + 1)
        pair.backward(3 * number + 2)
        pair.step()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@GATHER
def test_one_reduction_of_several_backwards(gather: str) -> None:
    pair = Pair("AdamW", gather)
    for number in range(STEPS):
        with pair.engine.coalesce_grad_reduction():
            pair.backward(2 * number)
            pair.backward(2 * number + 1)
        pair.step()


# -- actor, critic, reference and reward --


class Scores(nn.Module):
    """A score for each text."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone.base_model
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        scores: torch.Tensor = self.head(hidden[:, -1]).squeeze(-1)
        return scores


def scores_of(name: str, seed: int) -> Scores:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Scores(build(name, seed=seed))


def log_probs(model: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    """Of each token behind the first, ``(batch, length - 1)``."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def texts_of(actor: PreTrainedModel, iteration: int, rank: int) -> torch.Tensor:
    """As many new tokens as this rank draws, which differ."""
    prompt = token_ids(seed=100 * iteration + rank, batch=2, length=4)
    texts: torch.Tensor = actor.generate(prompt, max_new_tokens=2 + (3 * rank + iteration) % 5, do_sample=False)
    return texts


def actor_loss(
    actor: Callable[..., Any], ids: torch.Tensor, rewards: torch.Tensor, values: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    log_ratio = log_probs(actor, ids) - reference
    return (log_ratio.square().mean() - (log_ratio.mean(-1) * (rewards - values)).mean()) / 10


def critic_loss(critic: Callable[..., torch.Tensor], ids: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    return (critic(input_ids=ids) - rewards).square().mean()


def engine_of(model: nn.Module, *, trains: bool, **zero: Any) -> deepspeed.DeepSpeedEngine:
    engine, *_ = deepspeed.initialize(
        model=copy.deepcopy(model), config=zero3_config(lr=LR if trains else None, **zero)
    )
    return engine


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@GATHER
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_actor_critic_reference_and_reward(
    name: str, gather: str, rank: int, world_size: int, shared_dir: Path
) -> None:
    """Four engines in one process: trained on the device and on the host, read only on the host and from NVMe.

    Where ranks read alone, each generates as many tokens as it likes; else as many as the other.
    """
    nvme = {"device": "nvme", "nvme_path": str(shared_dir), "pin_memory": False}
    host = {"device": "cpu", "pin_memory": False}
    actor, reference = build(name), build(name)
    critic, reward = scores_of("opt", 1), scores_of(name, 2)
    actor_engine = engine_of(actor, trains=True, gather=gather)
    critic_engine = engine_of(critic, trains=True, gather=gather, offload_param=host, offload_optimizer=host)
    reference_engine = engine_of(reference, trains=False, gather=gather, offload_param=host)
    reward_engine = engine_of(reward, trains=False, gather=gather, offload_param=nvme)
    actor_trainer, critic_trainer = (PlainTrainer(model, lr=LR) for model in (actor, critic))

    for iteration in range(STEPS):
        uneven = gather == "auto"
        everyones = [texts_of(actor, iteration, r if uneven else 0) for r in range(world_size)]
        with torch.no_grad():
            ids = texts_of(actor_engine.module, iteration, rank if uneven else 0)
            assert ids.tolist() == everyones[rank].tolist()
            expected = [(reward(ids), critic(ids), log_probs(reference, ids)) for ids in everyones]
            if uneven and rank:
                reward_engine(input_ids=ids)  # Once more than the other rank.
            mine = reward_engine(input_ids=ids), critic_engine(input_ids=ids), log_probs(reference_engine, ids)
        for found, value in zip(mine, expected[rank], strict=True):
            LOSS.check(found, value, f"what is read in iteration {iteration}")
        for engine, trainer, loss_of in (
            (actor_engine, actor_trainer, lambda model, ids, values: actor_loss(model, ids, *values)),
            (critic_engine, critic_trainer, lambda model, ids, values: critic_loss(model, ids, values[0])),
        ):
            engine.train()
            loss = loss_of(engine, ids, mine)
            engine.backward(loss)
            engine.step()
            engine.eval()
            losses = [partial(loss_of, trainer.model, *pair) for pair in zip(everyones, expected, strict=True)]
            LOSS.check(loss.detach(), trainer.step_on(losses)[rank], f"a loss of iteration {iteration}")
            assert_same_weights(engine.module, trainer.model, WEIGHTS)
    for engine in (actor_engine, critic_engine, reference_engine, reward_engine):
        if gather == "collective" and world_size > 1:
            assert_released(engine.module)
        engine.destroy()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@GATHER
def test_new_engine_on_the_model_of_a_destroyed_one(gather: str) -> None:
    """With another optimizer; what was trained before is kept."""
    pair = Pair("AdamW", gather)
    for name in OPTIMIZERS:
        pair.backward(0)
        pair.step()
        pair.engine.destroy()
        model = pair.engine.module
        config = {**zero3_config(gather=gather), "zero_allow_untested_optimizer": True}
        pair.engine, *_ = deepspeed.initialize(model=model, optimizer=OPTIMIZERS[name](model.groups()), config=config)
        pair.optimizer = OPTIMIZERS[name](pair.plain.groups())
        pair.backward(1)
        pair.step()
