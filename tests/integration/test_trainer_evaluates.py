"""The Trainer of transformers over an engine: its evaluation loop, with a last batch that not all ranks have.

What the Trainer does to make batches even is its own business; the loss has to be that of plain torch over all
examples.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tests.harness import distributed
from tests.models import build, token_ids, zero3_config
from tests.trainer_runs import forget_earlier_trainers

EXAMPLES = 5
TIMEOUT_S = 120.0


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = token_ids(seed=index, batch=1)[0]
        return {"input_ids": ids, "labels": ids}


def trainer_of(model: PreTrainedModel, folder: Path, gather: str) -> Trainer:
    config = zero3_config(gather=gather, stage3_gather_16bit_weights_on_model_save=True)
    if gather == "auto":
        # The default. The word itself means something else to the Trainer.
        del config["zero_optimization"]["stage3_gather"]
    config["train_micro_batch_size_per_gpu"] = "auto"
    config["zero_allow_untested_optimizer"] = True
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())


def mean_loss(model: PreTrainedModel) -> float:
    with torch.no_grad():
        losses = [
            model(input_ids=ids, labels=ids).loss for ids in (token_ids(seed=n, batch=1) for n in range(EXAMPLES))
        ]
    return float(torch.stack(losses).mean())


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("gather", ["auto", "collective"])
@pytest.mark.parametrize("train", [False, True], ids=["evaluates only", "trains before"])
def test_evaluation_with_a_last_batch_that_one_rank_lacks(
    rank: int, gather: str, train: bool, shared_dir: Path
) -> None:
    plain = build("llama")
    forget_earlier_trainers()
    try:
        trainer = trainer_of(copy.deepcopy(plain), shared_dir, gather)
        if train:
            trainer.train()
            state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.deepspeed)
            if rank == 0:
                torch.save(state, shared_dir / "weights.pt")
            torch.distributed.barrier()
            plain.load_state_dict(torch.load(shared_dir / "weights.pt"))
        logged = trainer.evaluate()
    finally:
        forget_earlier_trainers()
    assert logged["eval_loss"] == pytest.approx(mean_loss(plain), rel=1e-4)
