#!/usr/bin/env python3
"""Generate again what generate.py wrote with --output, with plain transformers in one process, and compare the tokens.

    python examples/compare_with_plain.py --model MODEL --tokens tokens.json

Exit status 0 when every token is equal, 1 when one differs (the first difference of each prompt is shown), 2 when the
tokens cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def first_difference(got: list[int], expected: list[int]) -> int | None:
    """The first position at which two token sequences differ, or None."""
    if got == expected:
        return None
    pairs = zip(got, expected)  # up to the shorter; its end is a difference too
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(got), len(expected)))


def parse_arguments() -> tuple[str, dict[str, Any]]:
    """The model, and what generate.py recorded with that model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model that generate.py was given")
    parser.add_argument("--tokens", type=Path, required=True, help="the file that generate.py wrote with --output")
    options = parser.parse_args()
    try:
        recorded = json.loads(options.tokens.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--tokens {options.tokens}: expected a file of generate.py, got: {error}")
    model = recorded.get("model") if isinstance(recorded, dict) else None
    if model != options.model:
        parser.error(f"--tokens {options.tokens}: expected tokens of --model {options.model!r}, got those of {model!r}")
    return options.model, recorded


def main() -> int:
    model_name, recorded = parse_arguments()
    dtype = getattr(torch, recorded["ranks"][0]["dtype"])
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    compared = different = 0
    seconds = 0.0
    for batch in recorded["ranks"]:
        inputs = {name: torch.tensor(value, device=model.device) for name, value in batch["inputs"].items()}
        start = time.perf_counter()
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=recorded["max_new_tokens"], do_sample=False)
        seconds += time.perf_counter() - start
        expected = output[:, inputs["input_ids"].shape[1] :].tolist()
        if not len(batch["prompts"]) == len(batch["tokens"]) == len(expected):
            different += len(expected)
            counts = f"{len(batch['prompts'])} prompts and {len(batch['tokens'])} answers"
            print(f"rank {batch['rank']}: expected {len(expected)} prompts and answers, got {counts}")
            continue
        for prompt, got, want in zip(batch["prompts"], batch["tokens"], expected, strict=True):
            compared += len(want)
            at = first_difference(got, want)
            if at is not None:
                different += 1
                where = f"rank {batch['rank']}, {prompt!r}: token {at}"
                print(f"{where}: expected {want[at : at + 1]}, got {got[at : at + 1]}")
    print(f"plain transformers, one process: {compared / seconds:.1f} tokens/s")
    if different:
        print(f"DIFFERENT: {different} prompts do not equal plain transformers")
        return 1
    print(f"EQUAL: all {compared} tokens equal plain transformers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
