"""Run under ``accelerate launch``: accelerate's documented loop, or a script that comes with accelerate.

    accelerate_run.py loop MODEL OUTPUT
    accelerate_run.py script PATH

accelerate knows DeepSpeed on CPUs only where it was told that ranks are CPUs first, which its own scripts do not do.
``loop`` writes the losses of all ranks, in the order of the examples, to OUTPUT/losses.json and the model to OUTPUT.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.models import ADAM_EPS
from tests.trainer_runs import LR, Texts

EXAMPLES = 8


def loop(model_name: str, output: Path) -> None:
    PartialState(cpu=True)
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(model_name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=ADAM_EPS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Texts(EXAMPLES), batch_size=1))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses += accelerator.gather_for_metrics(loss.detach().view(1)).tolist()
    accelerator.unwrap_model(model).save_pretrained(
        output,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        (output / "losses.json").write_text(json.dumps(losses))
    accelerator.end_training()


def script(path: str) -> None:
    theirs = PartialState._prepare_backend

    def on_cpu(self: PartialState, cpu: bool = False, *rest: Any) -> Any:
        return theirs(self, True, *rest)

    PartialState._prepare_backend = on_cpu
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "loop":
        loop(sys.argv[2], Path(sys.argv[3]))
    else:
        script(sys.argv[2])
