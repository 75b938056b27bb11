#!/usr/bin/env python3
"""Compare the losses of two runs of finetune_trainer.py, step by step.

    python examples/compare_losses.py PLAIN/losses.json ZERO3/losses.json

Exit status 0 when all are equal within the tolerance, 1 when one differs (each is shown), 2 when they cannot be
compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

KINDS = {"losses": "training", "eval_losses": "evaluation"}


def recorded(path: str) -> dict[str, dict[str, float]]:
    """The losses of a run by kind and step."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return {kind: dict(content[kind]) for kind in KINDS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{path}: expected a losses.json of finetune_trainer.py, got: {error}"
        ) from error


def differences(one: dict[str, float], other: dict[str, float], tolerance: float) -> list[str]:
    """A line for each step at which the losses differ, or that only one of the runs has."""
    lines = []
    for step in sorted(one.keys() | other.keys(), key=int):
        # A step that is missing counts as NaN, which is close to nothing.
        first, second = one.get(step, math.nan), other.get(step, math.nan)
        if not math.isclose(first, second, rel_tol=tolerance):
            lines.append(f"step {step}: {first} and {second}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=recorded, nargs=2, help="two files losses.json")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="largest relative difference (default: %(default)s)"
    )
    options = parser.parse_args()
    one, other = options.runs
    different = 0
    for kind, name in KINDS.items():
        for line in differences(one[kind], other[kind], options.tolerance):
            different += 1
            print(f"{name}, {line}")
    compared = sum(len(one[kind].keys() | other[kind].keys()) for kind in KINDS)
    if different:
        print(f"DIFFERENT: {different} of {compared} losses")
        return 1
    print(f"EQUAL: all {compared} losses, within a relative {options.tolerance}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
