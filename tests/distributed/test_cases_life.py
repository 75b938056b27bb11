"""An engine that was destroyed is gone: no object, no memory, no process group, no shared segment (C28)."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import deepspeed
import psutil
import pytest
import torch
from torch import nn

from tests import shared_segments
from tests.comparisons import EXACT, PlainTrainer
from tests.distributed.twins import CLOSE, LR
from tests.harness import distributed
from tests.models import zero3_config

LIVES = 50
SETTLED_AFTER = 10
"""Lives until allocators and caches have what they keep for good."""
STEPS = 2
WIDTH = 256
MODEL_BYTES = 4 * 4 * WIDTH**2
ALLOWED_GROWTH_BYTES = 24 * MODEL_BYTES
"""What allocators may come to keep. A leak shows: ``LIVES - SETTLED_AFTER`` lives, each of at least four models."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def expected_losses(world_size: int, rank: int) -> list[float]:
    plain = make_model()
    trainer = PlainTrainer(plain, lr=LR)

    def loss_of(step: int, of_rank: int) -> Callable[[], torch.Tensor]:
        return lambda: plain(batch(step, of_rank)).square().mean()

    return [trainer.step_on([loss_of(step, r) for r in range(world_size)])[rank] for step in range(STEPS)]


def live_once(config: dict[str, Any], rank: int, expected: list[float]) -> list[weakref.ReferenceType[Any]]:
    """An engine from its beginning to its end. What should be gone with it."""
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for step in range(STEPS):
        loss = engine(batch(step, rank)).square().mean()
        engine.backward(loss)
        engine.step()
        CLOSE.check(loss.detach(), expected[step], f"the loss of step {step}")
    offload = engine.optimizer.parameter_offload
    kept = [model, model[1], engine, engine.optimizer, offload, offload.param_coordinator]
    engine.destroy()
    return [weakref.ref(thing) for thing in kept]


def segments_of_this_process() -> frozenset[str]:
    return shared_segments.held_by(os.getpid()) | shared_segments.named_after(
        [os.getpid(), int(os.environ["MASTER_PORT"])]
    )


def process_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def open_files() -> int:
    return psutil.Process().num_fds()


@distributed(world_size=(1, 2), timeout_s=120)
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_destroyed_engines_leave_nothing(offload: str, rank: int, world_size: int) -> None:
    config = zero3_config(offload=offload, lr=LR, stage3_prefetch_bucket_size=WIDTH**2)
    expected = expected_losses(world_size, rank)
    segments = segments_of_this_process()
    for life in range(LIVES):
        references = live_once(config, rank, expected)
        gc.collect()
        alive = [type(reference()).__name__ for reference in references if reference() is not None]
        assert alive == [], f"still alive after life {life}"
        if life == SETTLED_AFTER:
            resident_bytes = psutil.Process().memory_info().rss
            groups, files, threads = process_groups(), open_files(), psutil.Process().num_threads()
    assert process_groups() == groups
    assert psutil.Process().num_threads() == threads
    assert open_files() == files
    assert segments_of_this_process() <= segments
    growth_bytes = psutil.Process().memory_info().rss - resident_bytes
    assert growth_bytes <= ALLOWED_GROWTH_BYTES, f"{growth_bytes:,} bytes more after {LIVES} lives"


@distributed(world_size=(1, 2))
def test_model_outlives_its_engine(rank: int) -> None:
    """A model whose engine was destroyed has its weights still, and serves a second engine."""
    plain, model = make_model(), make_model()
    for _ in range(2):
        engine, *_ = deepspeed.initialize(model=model, config=zero3_config())
        with torch.no_grad():
            EXACT.check(engine(batch(0, rank)), plain(batch(0, rank)), "the output")
        engine.destroy()
        with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
            EXACT.check(model(batch(1, rank)), plain(batch(1, rank)), "the output without an engine")


@distributed(world_size=(1, 2))
def test_one_of_two_engines_is_destroyed(rank: int) -> None:
    plain = make_model()
    engines = [deepspeed.initialize(model=make_model(), config=zero3_config())[0] for _ in range(2)]
    for number in (0, 1):
        with torch.no_grad():
            for engine in engines[number:]:
                EXACT.check(engine(batch(0, rank)), plain(batch(0, rank)), f"the output with {number} destroyed")
        engines[number].destroy()


@distributed(world_size=(1, 2))
def test_engine_can_be_destroyed_in_the_middle(rank: int) -> None:
    """Between forward and backward, and twice."""
    engine = deepspeed.initialize(model=make_model(), config=zero3_config(lr=LR))[0]
    loss = engine(batch(0, rank)).square().mean()
    CLOSE.check(loss.detach(), make_model()(batch(0, rank)).square().mean().detach(), "the loss")
    engine.destroy()
    engine.destroy()
    reference = weakref.ref(engine.optimizer.parameter_offload.param_coordinator)
    del engine, loss
    gc.collect()
    assert reference() is None
