"""ZeRO-3 gives what the same model gives without DeepSpeed: logits, greedy tokens, losses, weights after training."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.comparisons import EXACT, PlainTrainer, Tolerance, assert_released, assert_same_weights
from tests.harness import distributed
from tests.models import ADAM_EPS, WEIGHT_DECAY, build, token_ids, zero3_config

ARCHITECTURES = ("llama", "mixtral", "gpt2")
OFFLOADS = ("none", "cpu")
STEPS = 3
NEW_TOKENS = 6
LR = 1e-2

FP32_LOSS = Tolerance(rtol=1e-5, atol=1e-5)
"""After an update: AdamW runs over flat partitions, where other elements fall into the vectorised part of the loop."""
FP32_WEIGHTS = Tolerance(rtol=1e-4, atol=LR / 100)
"""A weight that missed an update, or got a wrong one, is off by about ``LR``."""
BF16_LOSS = Tolerance(rtol=2e-2, atol=2e-2)
"""bf16 has 8 bits of mantissa; two ranks round their averaged gradients once more than one process does."""


def engine_for(model: nn.Module, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(model), config=config)
    return engine


def engine_with_offloaded_optimizer(model: nn.Module) -> deepspeed.DeepSpeedEngine:
    """Parameters and optimizer state on the CPU, with torch's AdamW: DeepSpeed's own has to be compiled first."""
    config = zero3_config(offload="cpu", offload_optimizer={"device": "cpu", "pin_memory": False})
    config["zero_force_ds_cpu_optimizer"] = False
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, eps=ADAM_EPS)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train_both(
    engine: deepspeed.DeepSpeedEngine, trainer: PlainTrainer, rank: int, world_size: int, losses: Tolerance = FP32_LOSS
) -> None:
    """Train engine and plain model on the same data, a batch of its own for each rank, comparing every loss."""
    engine.train()
    trainer.model.train()
    for step in range(STEPS):
        batches = [token_ids(seed=100 * step + r) for r in range(world_size)]
        loss = engine(input_ids=batches[rank], labels=batches[rank]).loss
        engine.backward(loss)
        assert_released(engine.module)
        engine.step()
        expected = trainer.step(batches)[rank]
        losses.check(loss.detach().float(), expected, f"the loss of step {step}")


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forward_and_generate(name: str, offload: str, rank: int) -> None:
    plain = build(name)
    engine = engine_for(plain, zero3_config(offload=offload))
    engine.eval()
    for seed in (rank, rank + 10):
        ids = token_ids(seed)
        with torch.no_grad():
            EXACT.check(engine(input_ids=ids).logits, plain(input_ids=ids).logits, "logits")
        assert_released(engine.module)
    tokens = engine.module.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert tokens.tolist() == plain.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False).tolist()
    assert_released(engine.module)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training(name: str, offload: str, rank: int, world_size: int) -> None:
    plain = build(name)
    engine = engine_for(plain, zero3_config(lr=LR)) if offload == "none" else engine_with_offloaded_optimizer(plain)
    trainer = PlainTrainer(plain, lr=LR)
    untrained = {n: p.detach().clone() for n, p in plain.named_parameters()}
    train_both(engine, trainer, rank, world_size)
    assert_same_weights(engine.module, plain, FP32_WEIGHTS)
    assert all(not torch.equal(p, untrained[n]) for n, p in plain.named_parameters())


@distributed(world_size=(1, 2))
def test_training_in_bf16(rank: int, world_size: int) -> None:
    plain = build("llama", dtype=torch.bfloat16)
    engine = engine_for(plain, {**zero3_config(lr=LR), "bf16": {"enabled": True}})
    trainer = PlainTrainer(plain, lr=LR, master_weights=True)
    train_both(engine, trainer, rank, world_size, losses=EXACT if world_size == 1 else BF16_LOSS)
    # Adam moves each weight by about lr whatever the size of its gradient, so rounding can turn a whole step around.
    assert_same_weights(engine.module, plain, EXACT if world_size == 1 else Tolerance(atol=2 * STEPS * LR))


def evaluate_between_steps(rank: int, world_size: int) -> deepspeed.DeepSpeedEngine:
    plain = build("llama")
    engine = engine_for(plain, zero3_config(lr=LR))
    trainer = PlainTrainer(plain, lr=LR)
    for _ in range(2):
        train_both(engine, trainer, rank, world_size)
        engine.eval()
        plain.eval()
        ids = token_ids(seed=rank, length=5)
        with torch.no_grad():
            # The logits follow from weights that differ by up to FP32_WEIGHTS.
            Tolerance(atol=1e-3).check(engine(input_ids=ids).logits, plain(input_ids=ids).logits, "logits")
    return engine


@distributed(world_size=(1, 2))
def test_eval_between_training_steps(rank: int, world_size: int) -> None:
    evaluate_between_steps(rank, world_size)


@distributed(world_size=(1, 2))
def test_eval_between_training_steps_leaves_nothing_behind(rank: int, world_size: int) -> None:
    assert_released(evaluate_between_steps(rank, world_size).module)
