"""Seq2SeqTrainer over an engine: trains an encoder and a decoder, and generates while it evaluates.

Ranks generate different numbers of tokens, and the last batch is not there for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from tests.comparisons import Tolerance
from tests.harness import distributed
from tests.models import ADAM_EPS, HEADS, HIDDEN, LAYERS, VOCABULARY, token_ids
from tests.trainer_runs import IGNORED, ds_config, forget_earlier_trainers, logged

TIMEOUT_S = 240.0
END = 60
"""A token that this model writes for some of the texts, at different places."""
STEPS = 6
LONGEST = 12
PREDICTED = 5


class Translations(Dataset[dict[str, torch.Tensor]]):
    """Each text is to be repeated, up to one of its tokens."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = token_ids(seed=index, batch=1)[0]
        labels = ids.clone()
        labels[3 + index % 4 :] = IGNORED
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    predictions: numpy.ndarray[Any, Any]  # (examples, tokens), filled up with the padding token


def tiny_t5() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=HIDDEN // HEADS,
            d_ff=2 * HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=END,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
        return model


def outcome(folder: Path, batches: int, deepspeed: dict[str, Any] | None) -> Outcome:
    """Train and predict: ``batches`` of one example for this process in each step."""
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        deepspeed=deepspeed,
        max_steps=STEPS,
        learning_rate=3e-3,
        adam_epsilon=ADAM_EPS,
        max_grad_norm=0.0,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=batches,
        predict_with_generate=True,
        generation_max_length=LONGEST,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Seq2SeqTrainer(model=tiny_t5(), args=arguments, train_dataset=Translations(2 * STEPS))
    trainer.train()
    predictions = trainer.predict(Translations(PREDICTED)).predictions
    return Outcome(list(logged(trainer, "loss").values()), predictions)


@pytest.fixture
def plain(world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    forget_earlier_trainers()
    result = outcome(tmp_path_factory.mktemp("plain"), world_size, None)
    forget_earlier_trainers()
    return result


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("offload", ["none", pytest.param("cpu", marks=pytest.mark.slow)])
def test_training_and_generated_predictions_equal_the_plain_trainers(
    offload: str, plain: Outcome, shared_dir: Path
) -> None:
    forget_earlier_trainers()
    got = outcome(shared_dir, 1, ds_config(offload, shared_dir))
    Tolerance(rtol=1e-4, atol=1e-4).check(torch.tensor(got.losses), torch.tensor(plain.losses), "loss")
    assert len({tuple(row).index(END) if END in row else LONGEST for row in plain.predictions}) > 2
    # On several ranks the Trainer keeps what it filled the last batch up with, with or without DeepSpeed.
    numpy.testing.assert_array_equal(got.predictions[:PREDICTED], plain.predictions)
