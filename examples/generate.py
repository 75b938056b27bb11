#!/usr/bin/env python3
"""Generate with a Hugging Face model under ZeRO-3: the weights are spread over the ranks, the prompts too.

    deepspeed --num_accelerators 2 examples/generate.py --model MODEL --prompts prompts.txt

MODEL is a folder (or hub name) of a causal language model with a chat template. Rank r takes every N-th prompt from
the r-th on, N being the number of ranks, and decodes them greedily as one batch. An answer that ends in " ..." was cut
at --max-new-tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import HfDeepSpeedConfig

EXAMPLES = Path(__file__).resolve().parent


@dataclass(frozen=True)
class RankResult:
    """What one rank generated: `inputs` are generate()'s arguments, `tokens[i]` the new token ids of `prompts[i]`.

    `cut[i]` says that they ended at the limit and not with an end-of-sequence token.
    """

    rank: int
    prompts: list[str]
    inputs: dict[str, list[list[int]]]
    tokens: list[list[int]]
    cut: list[bool]
    dtype: str
    seconds: float
    peak_host_bytes: int
    peak_device_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class ArgumentParser(argparse.ArgumentParser):
    """Says what is wrong in one line, once for each machine.

    The launcher kills every rank as soon as one has failed, maybe before the one that speaks has spoken. So the other
    ranks, which see the same arguments and files, leave with status 0.
    """

    def error(self, message: str) -> NoReturn:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            self.exit(0)
        self.exit(2, f"{self.prog}: error: {message}\n")


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from error


def prompts_file(path: str) -> list[str]:
    prompts = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if len(prompts) < ranks:  # a rank without work would not take part in gathering the weights
        raise argparse.ArgumentTypeError(f"{path}: expected a prompt for each of {ranks} ranks, got {len(prompts)}")
    return prompts


def zero3_config(path: str) -> dict[str, Any]:
    try:
        config = json.loads(read_text(path))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path}: expected JSON, got: {error}") from error
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage != 3:
        raise argparse.ArgumentTypeError(f"{path}: expected an object with zero_optimization.stage 3, got {stage!r}")
    return config


def model_name(name: str) -> str:
    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = "cannot read its config.json" if Path(name).is_dir() else "no such folder, and not readable from the hub"
        raise argparse.ArgumentTypeError(f"{name}: {what}: {str(error).splitlines()[0]}") from error
    return name


def parse_arguments() -> argparse.Namespace:
    """The arguments, with the files that they name read and checked."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=model_name, required=True, help="folder or hub name of a causal language model")
    prompts, ds_config = (str(EXAMPLES / name) for name in ("prompts.txt", "ds_config_zero3.json"))
    add("--prompts", type=prompts_file, default=prompts, help="text file, one prompt a line (default: %(default)s)")
    add("--ds-config", type=zero3_config, default=ds_config, help="DeepSpeed config (default: %(default)s)")
    add("--max-new-tokens", type=int, default=32, help="most tokens for each prompt (default: %(default)s)")
    add("--offload", choices=["none", "cpu", "nvme"], default="none", help="where shards rest (default: %(default)s)")
    add("--nvme-path", type=Path, help="folder on a fast disk, for --offload nvme")
    add("--output", type=Path, help="JSON file for the prompts and tokens of every rank")
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # given by the launcher
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"no RANK in the environment; run with: deepspeed --num_accelerators N {' '.join(sys.argv)}")
    if options.max_new_tokens < 1:
        parser.error(f"argument --max-new-tokens: expected at least 1, got {options.max_new_tokens}")
    if options.offload == "nvme" and options.nvme_path is None:
        parser.error("--offload nvme needs --nvme-path, a folder on a fast disk")
    return options


def with_offload(config: dict[str, Any], offload: str, nvme_path: Path | None) -> dict[str, Any]:
    """The DeepSpeed config with the place where the shards rest entered in it."""
    if offload == "none":
        return config
    target = {"device": offload, "pin_memory": get_accelerator().device_name() != "cpu"}
    if offload == "nvme":
        target["nvme_path"] = str(nvme_path)
    return {**config, "zero_optimization": {**config["zero_optimization"], "offload_param": target}}


def model_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that the DeepSpeed config asks for."""
    if config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if config.get("fp16", {}).get("enabled") else torch.float32


def encode(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Each prompt as a chat, left-padded to one batch: input_ids and attention_mask, (prompts, tokens)."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def generate(options: argparse.Namespace) -> tuple[RankResult, PreTrainedTokenizerBase]:
    """Load the model shard by shard and generate this rank's share of the prompts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    prompts = options.prompts[rank::world_size]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    batch = encode(tokenizer, prompts)
    ds_config = with_offload(options.ds_config, options.offload, options.nvme_path)

    # While this object lives, from_pretrained() keeps only this rank's shard of each weight that it reads.
    hf_ds_config = HfDeepSpeedConfig(ds_config)
    dtype = model_dtype(ds_config)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    engine.module.eval()

    inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    if rank == 0:
        each = f"each of {len(options.prompts)} prompts on {world_size} ranks"
        print(f"generating up to {options.max_new_tokens} tokens for {each} ...", flush=True)
    start = time.perf_counter()
    with torch.no_grad():
        output = engine.module.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    del hf_ds_config

    tokens = output[:, inputs["input_ids"].shape[1] :].tolist()
    end = engine.module.generation_config.eos_token_id  # one id, several or none
    ends = set(end) if isinstance(end, list) else {end}
    on_device = get_accelerator().device_name() != "cpu"
    result = RankResult(
        rank=rank,
        prompts=prompts,
        inputs={name: tensor.tolist() for name, tensor in inputs.items()},
        tokens=tokens,
        cut=[ends.isdisjoint(row) for row in tokens],
        dtype=str(dtype).removeprefix("torch."),
        seconds=seconds,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_device_bytes=get_accelerator().max_memory_allocated() if on_device else 0,
    )
    return result, tokenizer


def report(results: list[RankResult], tokenizer: PreTrainedTokenizerBase) -> None:
    for result in results:
        memory = f"{result.peak_host_bytes / 2**30:.2f} GiB of host memory"
        if result.peak_device_bytes:
            memory += f", {result.peak_device_bytes / 2**30:.2f} GiB of device memory"
        print(f"\nrank {result.rank}: {result.tokens_per_s:.1f} tokens/s, peak {memory}")
        for prompt, tokens, cut in zip(result.prompts, result.tokens, result.cut, strict=True):
            answer = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            print(f"  > {prompt}\n    {answer}{' ...' if cut else ''}")


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write JSON beside `path` and rename it, so that an interrupted run leaves nothing that looks whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> None:
    options = parse_arguments()
    deepspeed.init_distributed()
    result, tokenizer = generate(options)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        report(results, tokenizer)
        if options.output:
            ranks = [asdict(each) for each in results]
            content = {"model": options.model, "max_new_tokens": options.max_new_tokens, "ranks": ranks}
            write_whole(options.output, content)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
