"""One training run of the Trainer of transformers, plain in one process or over an engine on every rank.

The plain run sees the same examples in the same order: its accumulated batches are those of all ranks. Texts are of
unequal length, so that a rank's mean over its own tokens is not the mean over all tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.optim import AdamW
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.models import ADAM_EPS, build, token_ids

EXAMPLES_DIR = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = 40
LONGEST = 8
IGNORED = -100
LR = 1e-2
CLIPPING = 0.2
"""Below the norms of the gradients that the models here have, so that each step is clipped."""


class Texts(Dataset[dict[str, torch.Tensor]]):
    """``count`` examples, ``padded`` ones of 4 to 8 tokens or all of 8; what is padding has no label."""

    def __init__(self, count: int = EXAMPLES, *, padded: bool = True) -> None:
        self._count = count
        self._padded = padded

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = LONGEST - index % 5 * self._padded
        ids = token_ids(seed=index, batch=1, length=LONGEST)[0]
        mask = torch.arange(LONGEST) < tokens
        return {
            "input_ids": ids.where(mask, 0),
            "attention_mask": mask.long(),
            "labels": ids.where(mask, IGNORED),
        }


def held_back() -> Texts:
    """For evaluation: one more than a multiple of the ranks.

    All of one length. The Trainer fills the last batch with examples of the first and counts their tokens, so with
    others its loss depends on the number of ranks, with or without DeepSpeed.
    """
    return Texts(5, padded=False)


class MasterAdamW(AdamW):
    """AdamW that clips and updates in fp32 and rounds the result to the model's weights, as an engine does in bf16."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], clipping: float | None, **options: float) -> None:
        self._clipping = clipping
        self._rounded = list(parameters)
        self._masters = [parameter.detach().float().clone() for parameter in self._rounded]
        super().__init__(self._masters, **options)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for master, rounded in zip(self._masters, self._rounded, strict=True):
            master.grad = None if rounded.grad is None else rounded.grad.float()
        if self._clipping is not None:
            torch.nn.utils.clip_grad_norm_(self._masters, self._clipping)
        super().step(closure)
        with torch.no_grad():
            for master, rounded in zip(self._masters, self._rounded, strict=True):
                rounded.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for rounded in self._rounded:
            rounded.grad = None


@dataclass(frozen=True)
class Run:
    """What is trained and how. ``accumulation`` counts the batches of one rank in a step."""

    model: str = "llama"
    experts: str | None = None
    offload: str = "none"
    bf16: bool = False
    accumulation: int = 1
    clipped: bool = False
    checkpointing: str | None = None
    steps: int = 6

    def __post_init__(self) -> None:
        if self.checkpointing not in (None, "reentrant", "non-reentrant"):
            raise ValueError(f"checkpointing: expected reentrant or non-reentrant, got {self.checkpointing!r}")

    def __str__(self) -> str:
        """The name of a parametrized test."""
        chosen = [self.model, self.experts, self.offload, "bf16" if self.bf16 else "fp32", self.checkpointing]
        chosen += [
            f"{self.accumulation} batches" if self.accumulation > 1 else None,
            "clipped" if self.clipped else None,
        ]
        return "-".join(word for word in chosen if word)

    def build(self) -> PreTrainedModel:
        """The model with seeded weights, whole on this rank."""
        model = build(self.model)
        if self.experts is not None:
            model.set_experts_implementation(self.experts)
        if self.model == "mixtral":
            # The loss that balances the experts is that of a batch, not a sum over tokens.
            model.config.output_router_logits = True
        return model.to(torch.bfloat16 if self.bf16 else torch.float32)

    def arguments(self, folder: Path, **more: Any) -> TrainingArguments:
        options: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": self.steps,
            "learning_rate": LR,
            "adam_epsilon": ADAM_EPS,
            "weight_decay": 0.0,
            "max_grad_norm": CLIPPING if self.clipped else 0.0,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 1,
            "gradient_accumulation_steps": self.accumulation,
            "activation_checkpointing": self.checkpointing is not None,
            "activation_checkpointing_kwargs": {"use_reentrant": self.checkpointing == "reentrant"},
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        return TrainingArguments(**{**options, **more})


@dataclass(frozen=True)
class Curve:
    """What a run logged at each step, the loss of its evaluations by step, and the weights that it ended with."""

    losses: list[float]
    grad_norms: list[float]
    eval_losses: dict[int, float]
    weights: dict[str, torch.Tensor]


def forget_earlier_trainers() -> None:
    """accelerate keeps its state for the life of a process, and transformers the ds_config for that of a Trainer."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    unset_hf_deepspeed_config()


def ds_config(offload: str, nvme_path: Path) -> dict[str, Any]:
    """The ds_config of examples/ in which whatever the Trainer can fill in is ``auto``."""
    name = "zero3" if offload == "none" else offload
    config: dict[str, Any] = json.loads((EXAMPLES_DIR / f"ds_config_train_{name}.json").read_text())
    # torch's AdamW and not DeepSpeed's, which would have to be compiled.
    config["zero_force_ds_cpu_optimizer"] = False
    for section in ("offload_param", "offload_optimizer"):
        place = config["zero_optimization"].get(section, {})
        if "nvme_path" in place:
            place["nvme_path"] = str(nvme_path)
    return config


def logged(trainer: Trainer, key: str) -> dict[int, float]:
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


def plain_curve(run: Run, world_size: int, folder: Path, **more: Any) -> Curve:
    """Train without DeepSpeed, in this process: the batches of ``world_size`` ranks one after the other."""
    forget_earlier_trainers()
    model = run.build()
    masters = None
    if run.bf16:
        masters = MasterAdamW(
            model.parameters(), CLIPPING if run.clipped else None, lr=LR, eps=ADAM_EPS, weight_decay=0.0
        )
        more["max_grad_norm"] = 0.0
    trainer = Trainer(
        model=model,
        args=run.arguments(folder, gradient_accumulation_steps=world_size * run.accumulation, **more),
        train_dataset=Texts(),
        eval_dataset=held_back(),
        optimizers=(masters, None),
    )
    trainer.train()
    forget_earlier_trainers()
    return Curve(
        list(logged(trainer, "loss").values()),
        list(logged(trainer, "grad_norm").values()),
        logged(trainer, "eval_loss"),
        {name: value.detach().clone() for name, value in model.state_dict().items()},
    )


def zero3_trainer(run: Run, folder: Path, **more: Any) -> Trainer:
    """A Trainer over an engine. A collective: make it on all ranks, after ``forget_earlier_trainers``."""
    config = ds_config(run.offload, folder / "nvme")
    return Trainer(
        model=run.build(),
        args=run.arguments(folder, deepspeed=config, bf16=run.bf16, **more),
        train_dataset=Texts(),
        eval_dataset=held_back(),
    )
