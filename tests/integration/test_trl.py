"""trl's scripts (`trl sft`, `dpo`, `grpo`, ...) over the runtime give what they give without DeepSpeed.

The same script runs on as many ranks under DDP, whose data, seeds and generated texts are the same.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.models import unwrap_model_for_generation

from tests.comparisons import Tolerance, assert_released
from tests.distributed.test_cases_hooks import count, hooks_of
from tests.distributed.twins import LR, Twins
from tests.harness import distributed
from tests.integration.trl_run import Case, Outcome, run_cases
from tests.models import build, token_ids, zero3_config

WEIGHTS = Tolerance(rtol=1e-5, atol=1e-6)
STEPS = 3
LORA = "--use_peft --lora_r 4 --lora_alpha 8 --lora_dropout 0 --lora_target_modules q_proj v_proj"
EXPERTS = "--lora_target_parameters mlp.experts.gate_up_proj mlp.experts.down_proj"
ROLLOUTS = "--reward_funcs toy_rewards.length --num_generations 2 --max_completion_length 16"
REFERENCE = f"{ROLLOUTS} --beta 0.04 --num_iterations 2"

CASES = [
    Case("dpo, reference ahead of time", "dpo", "preferences", "--precompute_ref_log_probs"),
    Case("grpo", "grpo", "prompts", REFERENCE),
]
SLOW_CASES = [
    Case("sft", "sft", "conversations"),
    Case("sft, packed", "sft", "conversations", "--packing --attn_implementation eager"),
    Case("sft, adapters", "sft", "conversations", LORA),
    Case("sft, MoE", "sft", "conversations", model="mixtral"),
    Case("sft, MoE, adapters on experts", "sft", "conversations", f"{LORA} {EXPERTS}", "mixtral"),
    Case("dpo", "dpo", "preferences"),
    Case("dpo, MoE", "dpo", "preferences", model="mixtral"),
    Case("dpo, adapters", "dpo", "preferences", LORA),
    Case("dpo, adapters, reference ahead of time", "dpo", "preferences", f"{LORA} --precompute_ref_log_probs"),
    Case("grpo, not gathered", "grpo", "prompts", f"{REFERENCE} --ds3_gather_for_generation False"),
    Case("grpo, adapters", "grpo", "prompts", f"{REFERENCE} {LORA}"),
    Case("grpo, MoE", "grpo", "prompts", ROLLOUTS, "mixtral"),
    Case("grpo, MoE, not gathered", "grpo", "prompts", f"{ROLLOUTS} --ds3_gather_for_generation False", "mixtral"),
    Case("grpo, collective", "grpo", "prompts", REFERENCE, gather="collective"),
    Case(
        "grpo, collective, not gathered",
        "grpo",
        "prompts",
        f"{REFERENCE} --ds3_gather_for_generation False",
        gather="collective",
    ),
    Case("reward", "reward", "preferences"),
    Case("rloo", "rloo", "prompts", ROLLOUTS),
]


def compare(name: str, zero3: Outcome, plain: Outcome) -> None:
    assert len(zero3.logs) == len(plain.logs) == STEPS, name
    for step, (actual, expected) in enumerate(zip(zero3.logs, plain.logs, strict=True)):
        # As they are printed, to four digits.
        assert float(actual["loss"]) == pytest.approx(float(expected["loss"]), rel=2e-3, abs=1e-5), f"{name}, {step}"
    assert zero3.weights.keys() == plain.weights.keys(), name
    for weight, expected_weight in plain.weights.items():
        WEIGHTS.check(zero3.weights[weight], expected_weight, f"{name}: {weight}")


def test_scripts(tmp_path: Path) -> None:
    for name, (zero3, plain) in run_cases(tmp_path, CASES).items():
        compare(name, zero3, plain)


@pytest.mark.slow
def test_more_scripts(tmp_path: Path) -> None:
    for name, (zero3, plain) in run_cases(tmp_path, SLOW_CASES).items():
        compare(name, zero3, plain)


class GenerationFailed(Exception):
    pass


def accelerator_of_zero3() -> Any:
    """What trl asks an accelerator for."""
    return SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)), unwrap_model=lambda engine: engine.module
    )


def token_loss(step: int, model: Any, rank: int) -> torch.Tensor:
    ids = token_ids(seed=10 * step + rank)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@distributed(world_size=2)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("gathered", [False, True], ids=["not gathered", "gathered"])
@pytest.mark.parametrize("gather", ["auto", pytest.param("collective", marks=pytest.mark.slow)])
def test_generation_between_steps(gather: str, gathered: bool, fails: bool, rank: int) -> None:
    """trl's context manager leaves the model as it was, though it does nothing about exceptions itself."""
    twins = Twins(build("llama"), zero3_config(gather=gather, lr=LR))
    model = twins.engine.module
    hooks = count(hooks_of(model))
    for step in range(2):
        twins.train(partial(token_loss, step), f"the loss of step {step}")
        ids = token_ids(seed=50 + rank)
        try:
            with (
                unwrap_model_for_generation(twins.engine, accelerator_of_zero3(), gathered) as unwrapped,
                torch.no_grad(),
            ):
                # Ranks go on for different times where each reads for itself.
                tokens = 3 + 2 * rank * (gathered or gather == "auto")
                generated = unwrapped.generate(ids, max_new_tokens=tokens, do_sample=False)
                assert torch.equal(generated, twins.plain.generate(ids, max_new_tokens=tokens, do_sample=False))
                if fails:
                    raise GenerationFailed
        except GenerationFailed:
            pass
        assert count(hooks_of(model)) == hooks
        assert_released(model)
    twins.compare_weights()
