"""The Trainer over an engine: what it saves, and how it goes on from that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from tests.comparisons import EXACT, Tolerance, assert_same_weights
from tests.harness import distributed
from tests.trainer_runs import Curve, Run, forget_earlier_trainers, logged, plain_curve, zero3_trainer

TIMEOUT_S = 240.0
CLOSE = Tolerance(rtol=1e-4, atol=1e-4)
SAVED_AT = 2
BEST_IS_FIRST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": SAVED_AT,
    "save_strategy": "steps",
    "save_steps": SAVED_AT,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}
"""Training makes the loss smaller, so the best of these is not where it ends."""


def saved(trainer: Trainer, folder: Path) -> PreTrainedModel:
    """What the Trainer writes of its model, as transformers reads it where there is no DeepSpeed."""
    trainer.save_model(str(folder))
    deepspeed.comm.barrier()
    forget_earlier_trainers()
    return AutoModelForCausalLM.from_pretrained(folder)


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(
    "run",
    [Run("mixtral", offload="cpu", bf16=True), Run("gpt2", offload="nvme", accumulation=2, clipped=True)],
    ids=str,
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(run: Run, shared_dir: Path) -> None:
    forget_earlier_trainers()
    whole = zero3_trainer(run, shared_dir, save_strategy="steps", save_steps=SAVED_AT)
    whole.train()
    expected = saved(whole, shared_dir / "whole")
    assert_same_weights(whole.model_wrapped.module, expected)

    resumed = zero3_trainer(run, shared_dir)
    resumed.train(resume_from_checkpoint=str(shared_dir / f"checkpoint-{SAVED_AT}"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert logged(resumed, "grad_norm") == logged(whole, "grad_norm")
    assert_same_weights(resumed.model_wrapped.module, expected, EXACT)


@pytest.fixture
def plain_best(world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return plain_curve(Run(), world_size, tmp_path_factory.mktemp("plain"), **BEST_IS_FIRST)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_the_best_model_is_loaded_at_the_end(plain_best: Curve, shared_dir: Path) -> None:
    forget_earlier_trainers()
    trainer = zero3_trainer(Run(), shared_dir, **BEST_IS_FIRST)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(shared_dir / f"checkpoint-{SAVED_AT}")
    model = Run().build()
    model.load_state_dict(plain_best.weights)
    assert_same_weights(trainer.model_wrapped.module, model, CLOSE)
    logged_again = trainer.evaluate()["eval_loss"]
    assert logged_again == pytest.approx(max(plain_best.eval_losses.values()), rel=1e-4)
