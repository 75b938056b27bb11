"""The description of a benchmark, and finding the descriptions in `benchmarks/cases/`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.figure import Figure

T = TypeVar("T")

CASES_PACKAGE = "benchmarks.cases"


@dataclass(frozen=True)
class Rank:
    """What a case knows about the process that measures it."""

    rank: int
    world_size: int
    quick: bool
    scratch_dir: Path
    """Empty when the run starts, shared by its ranks, removed after the run."""

    def choose(self, full: T, quick: T) -> T:
        """The full size of something, or the small one that a smoke run takes."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Case:
    """A benchmark.

    The runner, which has no process group, imports the module of a case for this description alone. So a case imports
    torch, transformers and deepspeed inside `measure`, which runs in each rank process of either environment.
    """

    title: str
    measure: Callable[[Rank], list[Figure]]
    world_sizes: tuple[int, ...] = (1, 2)
    time_limit_s: float = 300.0

    def world_sizes_of_run(self, quick: bool) -> tuple[int, ...]:
        """Every number of ranks, or only the largest in a smoke run."""
        return (max(self.world_sizes),) if quick else self.world_sizes


def load(module: str) -> Case:
    """The `CASE` of a module; raises `TypeError` when there is none."""
    case = getattr(importlib.import_module(module), "CASE", None)
    if not isinstance(case, Case):
        raise TypeError(f"{module} must define CASE, a benchmarks.case.Case, but has {case!r}")
    return case


def discover(names: Sequence[str] = ()) -> dict[str, Case]:
    """The cases of the given names, or all of them; raises `ValueError` for a name that no file has."""
    known = sorted(path.stem for path in Path(__file__).with_name("cases").glob("*.py") if path.stem != "__init__")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no such case: {', '.join(unknown)}; there are: {', '.join(known)}")
    return {name: load(f"{CASES_PACKAGE}.{name}") for name in (names or known)}
