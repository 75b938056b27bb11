"""Steps of the Trainer of transformers, under ZeRO-3 and without DeepSpeed, and the memory that they take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Rank
from benchmarks.figure import Better, Figure
from benchmarks.peak_memory import HighWaterMark, in_fresh_process

LAYERS = 4
HIDDEN = 256
BATCH = 4
SEQUENCE = 128
WARM_UP_STEPS = 3
MODELS = ("dense", "mixture of experts")


@dataclass(frozen=True)
class Run:
    """What one process found."""

    steps_per_s: float
    peak_bytes: int
    model_bytes: int
    losses: list[float]


def measure(rank: Rank) -> list[Figure]:
    """Each model in processes of its own, plain (data-parallel where there are several ranks) and under ZeRO-3."""
    figures = []
    steps = rank.choose(full=10, quick=4)
    for name in MODELS:
        plain, zero = (
            in_fresh_process(_train, name, deepspeed, steps, rank.scratch_dir) for deepspeed in (False, True)
        )
        difference = max(abs(a - b) for a, b in zip(plain.losses, zero.losses, strict=True))
        if not difference <= 1e-3:
            raise RuntimeError(f"{name}: ZeRO-3 differs from the plain Trainer by {difference:.3g} in the loss")
        figures += [
            Figure(f"{name}: steps/s, ZeRO-3 / plain", zero.steps_per_s / plain.steps_per_s, "×", Better.HIGHER),
            Figure(f"{name}: ZeRO-3", zero.steps_per_s, "steps/s", Better.HIGHER),
            Figure(f"{name}: plain", plain.steps_per_s, "steps/s", Better.HIGHER),
            Figure(f"{name}: peak memory of a rank, ZeRO-3", zero.peak_bytes / zero.model_bytes, "× model"),
            Figure(f"{name}: peak memory of a rank, plain", plain.peak_bytes / plain.model_bytes, "× model"),
        ]
    return figures


def _train(name: str, deepspeed: bool, steps: int, folder: Path) -> Run:
    import torch
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from benchmarks import workload

    class Texts(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(1024, (SEQUENCE,), generator=generator)
            return {"input_ids": ids, "labels": ids}

    class Times(TrainerCallback):
        ends_s: list[float] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.ends_s.append(time.perf_counter())

    config = workload.zero3_config(micro_batch=BATCH)
    config["train_micro_batch_size_per_gpu"] = "auto"
    config["zero_allow_untested_optimizer"] = True
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config if deepspeed else None,
        per_device_train_batch_size=BATCH,
        max_steps=WARM_UP_STEPS + steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=True,
    )
    sizes = (workload.llama if name == "dense" else workload.mixtral)(LAYERS, HIDDEN)
    memory = HighWaterMark()
    trainer = Trainer(model=workload.build(sizes), args=arguments, train_dataset=Texts(), callbacks=[Times()])
    trainer.train()
    ends_s = Times.ends_s[WARM_UP_STEPS - 1 :]
    model_bytes = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trainer.model.parameters())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak_bytes = memory.take_bytes()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return Run((len(ends_s) - 1) / (ends_s[-1] - ends_s[0]), peak_bytes, model_bytes, losses)


CASE = Case(
    title=f"HF Trainer (Llama and Mixtral, {LAYERS} layers, hidden {HIDDEN}, {BATCH} × {SEQUENCE} tokens, AdamW, fp32)",
    measure=measure,
    time_limit_s=600.0,
)
