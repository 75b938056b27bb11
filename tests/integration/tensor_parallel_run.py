"""A script that ranks run: a model of a folder is divided among them. Each rank writes a line of JSON to its own file.

tensor_parallel_run.py FOLDER RESULTS [in-memory]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

TOKENS = torch.tensor([[1, 5, 9, 2], [3, 8, 4, 7]])
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}


def memory_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def divide(model: object) -> deepspeed.InferenceEngine:
    ranks = int(os.environ["WORLD_SIZE"])
    return deepspeed.init_inference(model, tensor_parallel={"tp_size": ranks}, dtype=torch.float32)


def main() -> None:
    folder, results, *options = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    # What is imported and connected at first use is not the model's.
    divide(MixtralForCausalLM(MixtralConfig(**SMALL)))
    in_memory = "in-memory" in options
    without_model = memory_bytes("RssAnon")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() if in_memory else folder
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    engine = divide(model)
    peak = memory_bytes("VmHWM") - before
    parameters = list(engine.module.parameters())
    figures = {
        "peak_bytes": peak,
        # Pages of the file that from_pretrained has mapped are not the model's, and the system takes them back.
        "after_bytes": memory_bytes("RssAnon") - without_model,
        "held_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "read_bytes": engine.loaded.bytes_read if engine.loaded else 0,
        "local_size": os.environ.get("LOCAL_SIZE"),
        "tokens": engine.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False).tolist(),
    }
    (Path(results) / f"{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
