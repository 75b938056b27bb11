#!/usr/bin/env python3
"""Generate with a Hugging Face model under ZeRO-3: the weights are spread over the ranks, the prompts too.

    deepspeed --num_accelerators 2 examples/generate.py --model MODEL --prompts prompts.txt

MODEL is a folder (or hub name) of a causal language model with a chat template. Rank r takes every N-th prompt from
the r-th on, N being the number of ranks, and decodes them greedily as one batch.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import HfDeepSpeedConfig

EXAMPLES = Path(__file__).resolve().parent


@dataclass(frozen=True)
class RankResult:
    """What one rank generated: `inputs` are generate()'s arguments, `tokens[i]` the new token ids of `prompts[i]`."""

    rank: int
    prompts: list[str]
    inputs: dict[str, list[list[int]]]
    tokens: list[list[int]]
    dtype: str
    seconds: float
    peak_host_bytes: int
    peak_device_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a causal language model")
    parser.add_argument("--prompts", type=Path, default=EXAMPLES / "prompts.txt", help="text file, one prompt a line")
    parser.add_argument("--ds-config", type=Path, default=EXAMPLES / "ds_config_zero3.json", help="DeepSpeed config")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens to generate for each prompt")
    parser.add_argument("--offload", choices=["none", "cpu", "nvme"], default="none", help="where the shards rest")
    parser.add_argument("--nvme-path", type=Path, help="folder on a fast disk, for --offload nvme")
    parser.add_argument("--output", type=Path, help="JSON file for the prompts and tokens of every rank")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # given by the launcher
    options = parser.parse_args()
    if options.offload == "nvme" and options.nvme_path is None:
        parser.error("--offload nvme needs --nvme-path, a folder on a fast disk")
    for name in ("prompts", "ds_config"):
        if not getattr(options, name).is_file():
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: no such file")
    return options


def read_prompts(path: Path, world_size: int) -> list[str]:
    """The prompts of all ranks. Raises ValueError when a rank would have none, since all ranks gather together."""
    prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(prompts) < world_size:
        raise ValueError(f"{path}: expected at least one prompt for each of {world_size} ranks, got {len(prompts)}")
    return prompts


def load_ds_config(path: Path, offload: str, nvme_path: Path | None) -> dict[str, Any]:
    """The DeepSpeed config with `offload` entered in it. Raises ValueError when it is not a ZeRO-3 config."""
    config = json.loads(path.read_text(encoding="utf-8"))
    zero = config.get("zero_optimization", {})
    if zero.get("stage") != 3:
        raise ValueError(f"{path}: expected zero_optimization.stage 3, got {zero.get('stage')!r}")
    if offload != "none":
        target = {"device": offload, "pin_memory": get_accelerator().device_name() != "cpu"}
        zero["offload_param"] = {**target, "nvme_path": str(nvme_path)} if offload == "nvme" else target
    return config


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
    prompts = read_prompts(options.prompts, world_size)[rank::world_size]
    ds_config = load_ds_config(options.ds_config, options.offload, options.nvme_path)

    # While this object lives, from_pretrained() keeps only this rank's shard of each weight that it reads.
    hf_ds_config = HfDeepSpeedConfig(ds_config)
    dtype = model_dtype(ds_config)
    config = AutoConfig.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype=dtype)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    engine.module.eval()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    inputs = {name: tensor.to(engine.device) for name, tensor in encode(tokenizer, prompts).items()}
    start = time.perf_counter()
    with torch.no_grad():
        output = engine.module.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    del hf_ds_config

    on_device = get_accelerator().device_name() != "cpu"
    result = RankResult(
        rank=rank,
        prompts=prompts,
        inputs={name: tensor.tolist() for name, tensor in inputs.items()},
        tokens=output[:, inputs["input_ids"].shape[1] :].tolist(),
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
        for prompt, tokens in zip(result.prompts, result.tokens):
            print(f"  > {prompt}\n    {tokenizer.decode(tokens, skip_special_tokens=True).strip()}")


def main() -> int:
    options = parse_arguments()
    deepspeed.init_distributed()
    try:
        result, tokenizer = generate(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        report(results, tokenizer)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            content = {"max_new_tokens": options.max_new_tokens, "ranks": [asdict(each) for each in results]}
            options.output.write_text(json.dumps(content) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
