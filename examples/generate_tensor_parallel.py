#!/usr/bin/env python3
"""Generate with a Hugging Face model that is divided among the ranks: each holds its part of every matrix.

    deepspeed --num_accelerators 2 examples/generate_tensor_parallel.py --model MODEL --prompts prompts.txt
    torchrun --nproc-per-node 2 examples/generate_tensor_parallel.py --model MODEL --prompts prompts.txt

MODEL is a folder (or hub name) of a causal language model with a chat template, its weights in safetensors files: each
rank reads its parts of them. All ranks work on all prompts, which are decoded greedily as one batch.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from generate import EXAMPLES, ArgumentParser, RankResult, encode, model_name, read_text, report, write_whole
from transformers import AutoTokenizer, PreTrainedTokenizerBase

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def prompts_file(path: str) -> list[str]:
    prompts = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise argparse.ArgumentTypeError(f"{path}: expected a prompt a line, got none")
    return prompts


def parse_arguments() -> argparse.Namespace:
    """The arguments, with the files that they name read and checked."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=model_name, required=True, help="folder or hub name of a causal language model")
    prompts = str(EXAMPLES / "prompts.txt")
    add("--prompts", type=prompts_file, default=prompts, help="text file, one prompt a line (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="type of the weights (default: %(default)s)")
    add("--max-new-tokens", type=int, default=32, help="most tokens for each prompt (default: %(default)s)")
    add("--output", type=Path, help="JSON file for the prompts and tokens")
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # given by the launcher
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"no RANK in the environment; run with: deepspeed --num_accelerators N {' '.join(sys.argv)}")
    if options.max_new_tokens < 1:
        parser.error(f"argument --max-new-tokens: expected at least 1, got {options.max_new_tokens}")
    return options


def generate(options: argparse.Namespace) -> tuple[RankResult, PreTrainedTokenizerBase]:
    """Load this rank's part of the model, and generate for all prompts together with the other ranks."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    engine = deepspeed.init_inference(
        options.model, tensor_parallel={"tp_size": int(os.environ["WORLD_SIZE"])}, dtype=DTYPES[options.dtype]
    )
    device = get_accelerator().current_device_name()
    inputs = {name: tensor.to(device) for name, tensor in encode(tokenizer, options.prompts).items()}
    start = time.perf_counter()
    output = engine.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
    seconds = time.perf_counter() - start

    tokens = output[:, inputs["input_ids"].shape[1] :].tolist()
    end = engine.module.generation_config.eos_token_id  # one id, several or none
    ends = set(end) if isinstance(end, list) else {end}
    on_device = get_accelerator().device_name() != "cpu"
    result = RankResult(
        rank=dist.get_rank(),
        prompts=options.prompts,
        inputs={name: tensor.tolist() for name, tensor in inputs.items()},
        tokens=tokens,
        cut=[ends.isdisjoint(row) for row in tokens],
        dtype=options.dtype,
        seconds=seconds,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_device_bytes=get_accelerator().max_memory_allocated() if on_device else 0,
    )
    return result, tokenizer


def main() -> None:
    options = parse_arguments()
    result, tokenizer = generate(options)
    if dist.get_rank() == 0:
        report([result], tokenizer)
        if options.output:
            content = {"model": options.model, "max_new_tokens": options.max_new_tokens, "ranks": [asdict(result)]}
            write_whole(options.output, content)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
