"""The results of a benchmark session, as they are kept in `results.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """One run of a case in one environment: the figures of each rank, or the reason why there are none."""

    case: str
    title: str
    environment: str
    world_size: int
    repeat: int
    wall_s: float
    figures: tuple[tuple[Figure, ...], ...] = ()
    """By rank."""
    failure: str | None = None


@dataclass(frozen=True)
class Session:
    """All runs of one session, and the circumstances under which they ran."""

    date: str
    command: str
    quick: bool
    machine: dict[str, str]
    releases: dict[str, dict[str, str]]
    """Of each environment: package and release."""
    wall_s: float
    runs: tuple[Run, ...]

    @property
    def failed(self) -> bool:
        return any(run.failure is not None for run in self.runs)


def write(session: Session, path: Path) -> None:
    """Writes a session as JSON, a run a line, so that a change of one shows as a change of one."""
    record: dict[str, Any] = {"format": FORMAT} | asdict(session)
    runs = record.pop("runs")
    head = json.dumps(record, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(run, ensure_ascii=False) for run in runs)
    path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read(path: Path) -> Session:
    """Reads what `write` wrote; raises `ValueError` for a file of another format."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if (found := record.pop("format", None)) != FORMAT:
        raise ValueError(f"{path}: expected results of format {FORMAT}, got {found}; run the benchmarks again")
    runs = tuple(
        Run(**run | {"figures": tuple(tuple(map(Figure.from_json, rank)) for rank in run["figures"])})
        for run in record.pop("runs")
    )
    return Session(**record, runs=runs)
