#!/usr/bin/env python3
"""Fine-tune a causal language model on text files with the Trainer of transformers, with or without DeepSpeed.

    python examples/finetune_trainer.py --model MODEL --text FILE... --output_dir OUT
    deepspeed --num_accelerators 2 examples/finetune_trainer.py --model MODEL --text FILE... --output_dir OUT \
        --deepspeed examples/ds_config_train_zero3.json

MODEL is a folder (or hub name). Every argument of TrainingArguments is one of this script (--max_steps, --bf16,
--gradient_checkpointing, ...; --help lists them), and the values "auto" of the DeepSpeed config follow from them.
OUT gets losses.json (which compare_losses.py reads), the curve as losses.png and, with --save_model, the model.

ds_config_train_cpu.json and ds_config_train_nvme.json keep parameters and optimizer on the host or on a disk. Without
an "optimizer" in the config the Trainer's own AdamW is used; with offload, accelerate makes it DeepSpeed's, which is
compiled at first use, unless "zero_force_ds_cpu_optimizer" is false.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass(frozen=True)
class TextArguments:
    """What is trained, and on what."""

    model: str = field(metadata={"help": "folder or hub name of a causal language model"})
    text: list[Path] = field(metadata={"help": "text files (UTF-8)"})
    block_tokens: int = field(default=128, metadata={"help": "tokens of an example"})
    eval_share: float = field(default=0.1, metadata={"help": "share of the examples that is kept for evaluation"})
    save_model: bool = field(default=False, metadata={"help": "write model and tokenizer to output_dir at the end"})

    def __post_init__(self) -> None:
        if self.block_tokens < 2:
            raise ValueError(f"--block_tokens: expected at least 2, got {self.block_tokens}")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"--eval_share: expected a number between 0 and 1, got {self.eval_share}")


class ArgumentParser(HfArgumentParser):
    """Says what is wrong in one line, once for each machine: the launcher ends all ranks as soon as one has failed."""

    def error(self, message: str) -> NoReturn:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            sys.exit(0)
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Token ids of equal length, (blocks, tokens), each its own labels."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def read_blocks(files: list[Path], tokenizer: PreTrainedTokenizerBase, block_tokens: int) -> torch.Tensor:
    """The files as one stream of tokens, an end-of-sequence token after each, cut into (blocks, block_tokens)."""
    stream: list[int] = []
    for file in files:
        # The warning that a text is longer than the model's context does not matter: it is cut.
        stream += tokenizer(file.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        stream.append(tokenizer.eos_token_id)
    blocks = len(stream) // block_tokens
    return torch.tensor(stream[: blocks * block_tokens]).view(blocks, block_tokens)


def split(blocks: torch.Tensor, eval_share: float) -> tuple[Blocks, Blocks]:
    """Training and evaluation examples. These are the last ones, so that no text is in both."""
    held_back = max(1, round(len(blocks) * eval_share))
    if held_back >= len(blocks):
        raise ValueError(f"--text: expected at least 2 blocks of {blocks.shape[1]} tokens, got {len(blocks)}")
    return Blocks(blocks[:-held_back]), Blocks(blocks[-held_back:])


def curve(history: list[dict[str, Any]], key: str) -> dict[int, float]:
    """What the Trainer logged under `key`, by step."""
    return {entry["step"]: entry[key] for entry in history if key in entry}


def draw(losses: dict[int, float], eval_losses: dict[int, float], file: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(list(losses), list(losses.values()), label="training")
    if eval_losses:
        axes.plot(list(eval_losses), list(eval_losses.values()), "o", label="evaluation")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats a token)")
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = ArgumentParser((TextArguments, TrainingArguments), description=__doc__)
    parser.set_defaults(logging_steps=1, report_to="none")
    try:
        # With --deepspeed this makes the config known to from_pretrained, which then keeps only this rank's shard of
        # each weight. So it comes before the model, and `arguments` has to live as long.
        text, arguments = parser.parse_args_into_dataclasses()
        tokenizer = AutoTokenizer.from_pretrained(text.model)
        train, evaluation = split(read_blocks(text.text, tokenizer, text.block_tokens), text.eval_share)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # The optimizer updates float32 weights; --bf16 is for the arithmetic.
    model = AutoModelForCausalLM.from_pretrained(text.model, dtype=torch.float32)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    eval_loss = trainer.evaluate()["eval_loss"]
    if text.save_model:
        trainer.save_model()
    if trainer.is_world_process_zero():
        output = Path(arguments.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        history = trainer.state.log_history
        losses, eval_losses = curve(history, "loss"), curve(history, "eval_loss")
        content = {"model": text.model, "losses": losses, "eval_losses": eval_losses}
        (output / "losses.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draw(losses, eval_losses, output / "losses.png")
        print(f"perplexity {math.exp(eval_loss):.2f} on {len(evaluation)} examples; losses in {output}/losses.png")


if __name__ == "__main__":
    main()
