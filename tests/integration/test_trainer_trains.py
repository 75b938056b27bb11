"""The Trainer of transformers over an engine, with ds_configs as users have them: its curve is the plain Trainer's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comparisons import Tolerance, assert_same_weights
from tests.harness import distributed
from tests.trainer_runs import Curve, Run, forget_earlier_trainers, logged, plain_curve, zero3_trainer

TIMEOUT_S = 240.0
FP32 = Tolerance(rtol=1e-4, atol=1e-4)
BF16 = Tolerance(rtol=2e-2, atol=2e-2)
"""The gradients of two ranks are rounded in another order than those of two batches."""
BF16_NORM = Tolerance(rtol=0.15, atol=2e-2)
"""The plain Trainer rounds its norms, too. In time, weights that differ by a rounding choose another expert."""


def evaluations(run: Run) -> dict[str, Any]:
    """None with a router's loss: the Trainer multiplies that of an evaluation by the number of ranks."""
    return {"eval_strategy": "steps", "eval_steps": 3} if run.model == "llama" else {}


SMOKE = [
    Run(offload="cpu", bf16=True, accumulation=2, clipped=True),
    Run(offload="nvme", checkpointing="non-reentrant"),
    Run(model="mixtral", checkpointing="reentrant", clipped=True),
]
MATRIX = [
    Run(model, experts, offload, bf16, accumulation, clipped, checkpointing, steps=20)
    for (model, experts), offload, bf16, (accumulation, clipped, checkpointing) in itertools.product(
        [("llama", None), ("mixtral", "eager"), ("mixtral", "batched_mm"), ("mixtral", "grouped_mm")],
        ["none", "cpu", "nvme"],
        [False, True],
        [(1, False, None), (1, True, "reentrant"), (3, True, "non-reentrant")],
    )
]


@pytest.fixture
def plain(run: Run, world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """What the plain Trainer does, in the pytest process."""
    return plain_curve(run, world_size, tmp_path_factory.mktemp("plain"), **evaluations(run))


def check_curve(run: Run, plain: Curve, folder: Path) -> None:
    forget_earlier_trainers()
    trainer = zero3_trainer(run, folder, **evaluations(run))
    trainer.train()
    tolerance = BF16 if run.bf16 else FP32
    for name, expected, within in (
        ("loss", plain.losses, tolerance),
        ("grad_norm", plain.grad_norms, BF16_NORM if run.bf16 else FP32),
    ):
        values = list(logged(trainer, name).values())
        assert len(values) == len(expected) == run.steps
        within.check(torch.tensor(values), torch.tensor(expected), name)
    assert bool(plain.eval_losses) == (run.model == "llama")
    assert logged(trainer, "eval_loss") == pytest.approx(plain.eval_losses, rel=tolerance.rtol)
    model = run.build()
    model.load_state_dict(plain.weights)
    assert_same_weights(trainer.model_wrapped.module, model, tolerance)
    forget_earlier_trainers()


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("run", SMOKE, ids=str)
def test_the_curve_equals_the_plain_trainers(run: Run, plain: Curve, shared_dir: Path) -> None:
    check_curve(run, plain, shared_dir)


@pytest.mark.slow
@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("run", MATRIX, ids=str)
def test_every_combination_equals_the_plain_trainer(run: Run, plain: Curve, shared_dir: Path) -> None:
    check_curve(run, plain, shared_dir)
