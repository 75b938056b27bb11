"""How long a fresh interpreter takes to `import deepspeed`, against `import torch`, which is part of it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from benchmarks.case import Case, Rank
from benchmarks.figure import Figure
from benchmarks.timing import interleaved_medians_s

IMPORT_LIMIT_S = 60


def measure(rank: Rank) -> list[Figure]:
    """Times interpreters that import one package and end; the first round fills the page cache and is not counted."""

    def import_in_fresh_interpreter(package: str) -> None:
        subprocess.run(
            [sys.executable, "-c", f"import {package}"],
            cwd=rank.scratch_dir,
            check=True,
            capture_output=True,
            timeout=IMPORT_LIMIT_S,
        )

    medians_s = interleaved_medians_s(
        {package: partial(import_in_fresh_interpreter, package) for package in ("torch", "deepspeed")},
        samples=rank.choose(full=4, quick=1),
        warm_ups=rank.choose(full=1, quick=0),
        line_up=lambda: None,
    )
    return [
        Figure("import deepspeed / import torch", medians_s["deepspeed"] / medians_s["torch"], "× torch"),
        Figure("import torch", medians_s["torch"], "s"),
    ]


CASE = Case(title="import", measure=measure, world_sizes=(1,))
