"""After an exception in the user's own code, on all ranks, the engine works as if nothing had been."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.comparisons import Tolerance, assert_released
from tests.distributed.twins import LR, Twins
from tests.harness import distributed
from tests.models import build, token_ids, zero3_config
from tests.moe import RoutedModel, hidden_states, seeded

OFFLOADS = ("none", "cpu")
LOSS = Tolerance(rtol=1e-4, atol=1e-4)
LLAMA_MODULES = ("model.embed_tokens", "model.layers.0.self_attn", "model.layers.1.mlp.down_proj", "lm_head")
ROUTED_MODULES = ("first", "blocks.1", "blocks.1.router", "blocks.1.experts.2.down", "last")
NEW_TOKENS = 4


class Interrupted(Exception):
    """Raised by user code in the middle of a pass."""


@contextlib.contextmanager
def interrupted(module: nn.Module, where: str) -> Iterator[None]:
    """Expect the exception that the module raises before its forward, after it, or in its backward."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    def interrupt_backward(module: nn.Module, args: object, output: Any) -> None:
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        tensor.register_hook(interrupt)

    hook = {
        "before": lambda: module.register_forward_pre_hook(interrupt),
        "after": lambda: module.register_forward_hook(interrupt),
        "backward": lambda: module.register_forward_hook(interrupt_backward),
    }[where]()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        hook.remove()


def token_loss(seed: int, model: Any, rank: int) -> torch.Tensor:
    ids = token_ids(seed=100 * seed + rank)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def routed_loss(seed: int, model: Any, rank: int) -> torch.Tensor:
    model.route_to((0, 2))
    output: torch.Tensor = model(hidden_states(seed=100 * seed + rank))
    return output.square().mean()


def compare_generate(twins: Twins, rank: int) -> None:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    ids = token_ids(seed=rank, batch=1)
    expected = twins.plain.generate(ids, **options)
    assert twins.engine.module.generate(ids, **options).tolist() == expected.tolist()
    assert_released(twins.engine.module)


WHERE = pytest.mark.parametrize("where", ["before", "after", "backward"])


@distributed(world_size=(1, 2), timeout_s=60)
@pytest.mark.parametrize("offload", OFFLOADS)
@WHERE
@pytest.mark.parametrize("path", LLAMA_MODULES)
def test_llama_after_an_exception(path: str, where: str, offload: str, rank: int) -> None:
    """In the first pass of all, and again once the order of modules is known."""
    twins = Twins(build("llama"), zero3_config(offload=offload, lr=LR))
    for attempt in range(2):
        with interrupted(twins.engine.module.get_submodule(path), where):
            twins.engine.backward(token_loss(attempt, twins.engine, rank))
        twins.engine.zero_grad()
        twins.engine.optimizer.zero_grad()
        compare_generate(twins, rank)
        for step in range(2):
            twins.train(partial(token_loss, 10 * attempt + step), f"loss {step} after exception {attempt}", LOSS)
            assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=(1, 2))
@WHERE
@pytest.mark.parametrize("path", ROUTED_MODULES)
def test_experts_after_an_exception(path: str, where: str, rank: int) -> None:
    """Only some experts run, so that the interrupted pass and the next are not of one order either."""
    twins = Twins(seeded(RoutedModel))
    for step in range(2):
        twins.train(partial(routed_loss, step), f"the loss of step {step}")
    with interrupted(twins.engine.module.get_submodule(path), where):
        twins.engine.backward(routed_loss(5, twins.engine, rank))
    twins.engine.zero_grad()
    twins.engine.optimizer.zero_grad()
    twins.compare_forward(partial(routed_loss, 6), "the output after the exception", Tolerance(atol=1e-3))
    assert_released(twins.engine.module)
    for step in range(10, 13):
        twins.train(partial(routed_loss, step), f"the loss of step {step}", LOSS)
        assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("path", ROUTED_MODULES)
def test_forwards_after_exceptions_in_forwards(path: str, offload: str, rank: int) -> None:
    twins = Twins(seeded(RoutedModel), zero3_config(offload=offload))
    twins.engine.eval()
    for attempt in range(4):
        with interrupted(twins.engine.module.get_submodule(path), "before"), torch.no_grad():
            routed_loss(attempt, twins.engine, rank)
        twins.compare_forward(partial(routed_loss, 10 + attempt), f"the output after exception {attempt}")
        assert_released(twins.engine.module)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("where", ["before", "after"])
def test_exception_in_the_second_micro_step(where: str, rank: int) -> None:
    """The first micro-step's gradients are not lost: the second is simply run again."""
    twins = Twins(seeded(RoutedModel), {**zero3_config(lr=LR), "gradient_accumulation_steps": 2})
    loss_of = [partial(routed_loss, step) for step in range(4)]
    twins.train_on(loss_of[:2], "the loss before the exception")
    first = loss_of[2](twins.engine, rank)
    twins.engine.backward(first)
    twins.engine.step()
    with interrupted(twins.engine.module.get_submodule("blocks.1.experts.2.down"), where):
        loss_of[3](twins.engine, rank)
    second = loss_of[3](twins.engine, rank)
    twins.engine.backward(second)
    twins.engine.step()
    ranks = range(torch.distributed.get_world_size())
    twins.trainer.step_on([partial(loss, twins.plain, r) for loss in loss_of[2:] for r in ranks])
    twins.compare_weights()
