"""Report: RLHF step 3 under ZeRO-3 with several generation batches, ``assert ds_status == AVAILABLE``.

The reported loop works today and is kept as a regression: an actor and a critic, each a ZeRO-3 engine; every
iteration generates for several batches without grad, then trains on them for two epochs. Everything is compared with
the same loop in plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.comparisons import PlainTrainer, Tolerance, assert_released, assert_same_weights
from tests.harness import distributed
from tests.models import HIDDEN, build, token_ids, zero3_config

GENERATION_BATCHES = 3
PPO_EPOCHS = 2
ITERATIONS = 2
NEW_TOKENS = 4
LR = 1e-3
LOSS = Tolerance(rtol=1e-4, atol=1e-4)
WEIGHTS = Tolerance(rtol=1e-3, atol=LR / 10)


class Critic(nn.Module):
    """A value for each token, from a smaller model of the same kind as the actor."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone.base_model
        self.value_head = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.value_head(self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state).squeeze(-1)


def make_critic(name: str) -> Critic:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Critic(build(name, seed=7))


def actor_loss(actor: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    return actor(input_ids=ids, labels=ids).loss


def critic_loss(critic: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return (critic(input_ids=ids) - ids.float() / 64).square().mean()


@dataclass
class Trained:
    """An engine and its plain twin, updated in step."""

    engine: deepspeed.DeepSpeedEngine
    plain: PlainTrainer
    loss_of: Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]
    accumulation: int
    _seen: int = 0

    @classmethod
    def of(cls, model: nn.Module, loss_of: Callable[..., torch.Tensor], accumulation: int = 1) -> Trained:
        config = {**zero3_config(gather="auto", lr=LR), "gradient_accumulation_steps": accumulation}
        engine, *_ = deepspeed.initialize(model=copy.deepcopy(model), config=config)
        return cls(engine, PlainTrainer(model, lr=LR), loss_of, accumulation)

    def train(self, batches: list[torch.Tensor], rank: int) -> None:
        """One micro-step; ``batches`` holds one for each rank."""
        loss = self.loss_of(self.engine, batches[rank])
        self.engine.backward(loss)
        self.engine.step()
        expected = [self.loss_of(self.plain.model, ids) for ids in batches]
        sum(expected, torch.zeros(())).div(len(batches) * self.accumulation).backward()
        self._seen += 1
        if self._seen % self.accumulation == 0:
            self.plain.update()
        LOSS.check(loss.detach(), expected[rank].detach(), f"the loss of micro-step {self._seen}")


def generate(actor: Trained, prompts: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Answers of the plain actor for every rank's prompt, after comparing this rank's with the engine's."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    actor.engine.eval()
    actor.plain.model.eval()
    answers = [actor.plain.model.generate(ids, **options) for ids in prompts]
    with torch.no_grad():
        mine = actor.engine.module.generate(prompts[rank], **options)
    assert mine.tolist() == answers[rank].tolist()
    actor.engine.train()
    actor.plain.model.train()
    return answers


@distributed(world_size=(1, 2), timeout_s=60)
@pytest.mark.parametrize(
    ("name", "with_critic", "accumulation"),
    [("opt", True, 1), ("opt", False, 3), ("llama", True, 3), ("llama", False, 1)],
)
def test_reported_loop(name: str, with_critic: bool, accumulation: int, rank: int, world_size: int) -> None:
    actor = Trained.of(build(name), actor_loss, accumulation)
    trained = [actor]
    if with_critic:
        trained.append(Trained.of(make_critic(name), critic_loss, accumulation))
    for iteration in range(ITERATIONS):
        experience = []
        for batch in range(GENERATION_BATCHES):
            seed = 1000 * iteration + 10 * batch
            experience.append(generate(actor, [token_ids(seed + r, length=5) for r in range(world_size)], rank))
        for _ in range(PPO_EPOCHS):
            for answers in experience:
                for model in trained:
                    model.train(answers, rank)
    for model in trained:
        assert_same_weights(model.engine.module, model.plain.model, WEIGHTS)


class Interrupted(Exception):
    """Raised by user code in the middle of a pass."""


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_the_middle(where: str, rank: int, world_size: int) -> None:
    actor = Trained.of(build("llama"), actor_loss)
    batches = [token_ids(r) for r in range(world_size)]
    actor.train(batches, rank)
    middle = actor.engine.module.model.layers[1].mlp

    def interrupt(*_: object) -> None:
        raise Interrupted

    hook = (
        middle.register_forward_pre_hook(interrupt)
        if where == "forward"
        else middle.register_full_backward_hook(interrupt)
    )
    with pytest.raises(Interrupted):
        actor.engine.backward(actor_loss(actor.engine, batches[rank]))
    hook.remove()
    actor.engine.zero_grad()
    generate(actor, batches, rank)


@distributed(world_size=(1, 2))
def test_forward_without_backward(rank: int, world_size: int) -> None:
    actor = Trained.of(build("opt"), actor_loss)
    for step in range(3):
        batches = [token_ids(10 * step + r) for r in range(world_size)]
        actor_loss(actor.engine, batches[rank])
        actor.train(batches, rank)
        generate(actor, batches, rank)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_with_frozen_layers(reentrant: bool, rank: int, world_size: int) -> None:
    plain = build("llama")
    plain.model.layers[0].requires_grad_(False)
    plain.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        plain.enable_input_require_grads()
    actor = Trained.of(plain, actor_loss)
    for step in range(3):
        actor.train([token_ids(10 * step + r) for r in range(world_size)], rank)
    assert_same_weights(actor.engine.module, plain, WEIGHTS)
    assert_released(actor.engine.module)


# -- what fails today --


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.relu(self.shared(x))
        return [head(hidden).square().mean() for head in self.heads]


def small_engine(model: nn.Module, **config: Any) -> deepspeed.DeepSpeedEngine:
    engine, *_ = deepspeed.initialize(
        model=copy.deepcopy(model), config={**zero3_config(gather="auto", lr=LR), **config}
    )
    return engine


@distributed(world_size=(1, 2))
def test_two_losses_from_one_forward() -> None:
    plain = TwoLosses()
    engine = small_engine(plain, gradient_accumulation_steps=2)
    x = torch.randn(4, 8)
    first, second = engine(x)
    engine.backward(first, retain_graph=True)
    engine.step()
    engine.backward(second)
    engine.step()
    trainer = PlainTrainer(plain, lr=LR)
    trainer.step_on([lambda: plain(x)[0], lambda: plain(x)[1]])
    assert_same_weights(engine.module, plain, WEIGHTS)


@distributed(world_size=(1, 2))
def test_parameter_without_elements() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 0))
    engine = small_engine(plain)
    x = torch.randn(4, 8)

    def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return model(x).sum()

    loss = loss_of(engine)
    engine.backward(loss)
    engine.step()
    PlainTrainer(plain, lr=LR).step_on([lambda: loss_of(plain)])
    assert_same_weights(engine.module, plain, WEIGHTS)


class AdaptedLinear(nn.Module):
    """What LoRA makes of a linear layer: the frozen layer and a pair of small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def pass_through_added_module(train: bool) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = small_engine(plain)
    for model in (plain, engine.module):
        torch.manual_seed(0)
        model[1] = AdaptedLinear(model[1])
    x = torch.randn(4, 8)
    output, expected = engine(x), plain(x)
    LOSS.check(output.detach(), expected.detach(), "the output")
    engine.backward(output.square().mean())
    expected.square().mean().backward()
    LOSS.check(engine.module[1].up.weight.grad, plain[1].up.weight.grad, "the gradient of the added weight")
    if train:
        engine.step()


@distributed(world_size=(1, 2))
def test_module_added_after_initialize_has_gradients() -> None:
    pass_through_added_module(train=False)


@distributed(world_size=(1, 2))
def test_step_after_a_module_was_added() -> None:
    with pytest.raises(RuntimeError, match="was added to the model after deepspeed.initialize"):
        pass_through_added_module(train=True)
