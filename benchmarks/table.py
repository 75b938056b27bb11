"""From the runs of a session to the rows of its table and the bars of its chart. Pure: nothing is read or measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.figure import TIMES_PLAIN, Aim, Better, Figure
from benchmarks.results import Run

FORK = "fork"
BASE = "base"
HEADER = ("benchmark", "figure", "ranks", "fork", "base", "fork / base", "aim")
NOTHING = "–"


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the values of several runs."""

    median: float
    low: float
    high: float

    @staticmethod
    def over(values: Iterable[float]) -> Spread | None:
        """The spread of some values, or nothing where there are none."""
        ordered = sorted(values)
        return Spread(statistics.median(ordered), ordered[0], ordered[-1]) if ordered else None


@dataclass(frozen=True)
class Cell:
    """What one environment has to show for a figure: the spread over its good runs, and why the others are none."""

    spread: Spread | None
    failures: tuple[str, ...]
    run_count: int


@dataclass(frozen=True)
class Row:
    """One figure at one number of ranks in both environments."""

    title: str
    world_size: int
    figure: Figure | None
    """Name, unit, direction and aim; its value is that of some run. Nothing where every run of the case failed."""
    fork: Cell
    base: Cell
    fork_over_base: Spread | None
    """Over the pairs of runs that followed each other, so that the machine's drift cancels out."""


@dataclass(frozen=True)
class Bar:
    """One row of the chart: the same ratio in both environments."""

    label: str
    fork: Spread | None
    base: Spread | None
    aim: Aim | None


def rows(runs: Sequence[Run]) -> tuple[Row, ...]:
    """A row for each case, number of ranks and figure, in the order of the runs."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.case, run.world_size), []).append(run)
    return tuple(row for group in groups.values() for row in _rows_of_group(group))


def bars(table: Sequence[Row], better: Better = Better.LOWER) -> tuple[Bar, ...]:
    """The ratios to plain torch that improve in the given direction."""
    return tuple(
        Bar(
            label=f"{row.title}\n{row.figure.name}, {_ranks(row.world_size)}",
            fork=row.fork.spread,
            base=row.base.spread,
            aim=row.figure.aim,
        )
        for row in table
        if row.figure is not None and row.figure.unit == TIMES_PLAIN and row.figure.better is better
    )


def markdown(table: Sequence[Row]) -> str:
    """The rows as a table of Markdown; a title stands only where it changes."""
    lines = [_markdown_line(HEADER), _markdown_line(["---"] * 2 + ["---:"] * 4 + ["---"])]
    title_above = ""
    for row in table:
        cells = _texts(row)
        lines.append(_markdown_line([row.title if row.title != title_above else "", *cells]))
        title_above = row.title
    return "\n".join(lines)


def number(value: float) -> str:
    """Three significant digits without an exponent, and more only where the integer part has them."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.3g}")  # 0.9996 has its first digit one place further left than it seems
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{decimals}f}"


def _rows_of_group(group: Sequence[Run]) -> list[Row]:
    """The rows of one case at one number of ranks."""
    title, world_size = group[0].title, group[0].world_size
    worst = {(run.environment, run.repeat): _worst_of_ranks(run) for run in group}
    figures = {figure.name: figure for by_name in worst.values() for figure in by_name.values()}

    def cell(environment: str, name: str | None) -> Cell:
        own = [run for run in group if run.environment == environment]
        values = [worst[environment, run.repeat][name].value for run in own if name in worst[environment, run.repeat]]
        return Cell(Spread.over(values), tuple(run.failure for run in own if run.failure is not None), len(own))

    def fork_over_base(name: str) -> Spread | None:
        pairs = [(worst.get((FORK, repeat), {}), worst.get((BASE, repeat), {})) for repeat in {r.repeat for r in group}]
        return Spread.over(
            fork[name].value / base[name].value
            for fork, base in pairs
            if name in fork and name in base and base[name].value
        )

    if not figures:
        return [Row(title, world_size, None, cell(FORK, None), cell(BASE, None), None)]
    return [
        Row(title, world_size, figure, cell(FORK, name), cell(BASE, name), fork_over_base(name))
        for name, figure in figures.items()
    ]


def _worst_of_ranks(run: Run) -> dict[str | None, Figure]:
    """By name, the figure of the rank that did worst: a group is as slow as its slowest rank."""
    by_name: dict[str | None, list[Figure]] = {}
    for of_rank in run.figures:
        for figure in of_rank:
            by_name.setdefault(figure.name, []).append(figure)
    return {
        name: next(f for f in figures if f.value == f.better.worst([each.value for each in figures]))
        for name, figures in by_name.items()
    }


def _texts(row: Row) -> list[str]:
    """The cells of a row behind its title."""
    figure = row.figure
    name = NOTHING if figure is None else f"{figure.name} ({figure.unit}, {figure.better.value} is better)"
    ratio = NOTHING if row.fork_over_base is None else _spread_text(row.fork_over_base)
    return [name, str(row.world_size), _cell_text(row.fork), _cell_text(row.base), ratio, _aim_text(row)]


def _cell_text(cell: Cell) -> str:
    reasons = "; ".join(dict.fromkeys(cell.failures))
    if cell.spread is None:
        return f"failed: {reasons}" if reasons else NOTHING
    text = _spread_text(cell.spread)
    return f"{text}, {len(cell.failures)} of {cell.run_count} failed: {reasons}" if reasons else text


def _spread_text(spread: Spread) -> str:
    return f"**{number(spread.median)}** ({number(spread.low)}–{number(spread.high)})"


def _aim_text(row: Row) -> str:
    """The aim, its note, and whether the fork's median keeps to it."""
    if row.figure is None or row.figure.aim is None:
        return ""
    aim, better = row.figure.aim, row.figure.better
    text = f"{'≤' if better is Better.LOWER else '≥'} {aim.limit:g}"
    if aim.note:
        text += f" ({aim.note})"
    if row.fork.spread is not None:
        text += ": met" if aim.is_met(row.fork.spread.median, better) else ": not met"
    return text


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
