"""The chart of a session: its ratios to plain torch, fork beside base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from benchmarks import table
from benchmarks.figure import Better

BAR_HEIGHT = 0.36
INCHES_PER_BAR = 0.62
WIDTH_INCHES = 10.0
PLAIN = 1.0
"""Where the bars begin: the axis is logarithmic, and a bar that shows nothing but plain torch has no length."""
COLORS = {table.FORK: "#2166ac", table.BASE: "#b8b8b8"}


def draw(rows: Sequence[table.Row], path: Path) -> None:
    """Writes the PNG: a panel for the ratios that should be low, and one for those that should be high, if any."""
    panels = {better: bars for better in Better if (bars := table.bars(rows, better))}
    heights = [len(bars) for bars in panels.values()] or [1]
    canvas = Canvas(figsize=(WIDTH_INCHES, 1.4 * len(heights) + INCHES_PER_BAR * sum(heights)), layout="constrained")
    axes = canvas.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (better, bars) in zip(axes, panels.items()):
        _draw_panel(panel, bars, better)
    canvas.savefig(path, dpi=110, metadata={"Software": None})


def _draw_panel(axes: Axes, bars: Sequence[table.Bar], better: Better) -> None:
    for index, bar in enumerate(bars):
        for offset, label in ((-0.5, table.FORK), (0.5, table.BASE)):
            spread = bar.fork if label == table.FORK else bar.base
            _draw_bar(axes, index + offset * BAR_HEIGHT, label, spread)
        if bar.aim is not None:
            axes.plot([bar.aim.limit] * 2, [index - BAR_HEIGHT, index + BAR_HEIGHT], color="#d6604d", linewidth=2)
    axes.axvline(PLAIN, color="black", linewidth=0.8)
    axes.set_xscale("log")
    shown = [spread for bar in bars for spread in (bar.fork, bar.base) if spread is not None]
    # Room on the right for the numbers behind the longest bars.
    axes.set_xlim(min([PLAIN, *(s.low for s in shown)]) / 1.1, 1.35 * max([2.0, *(s.high for s in shown)]))
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_xlabel(f"times plain torch, {better.value} is better", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    handles: list[Artist] = [Patch(color=color, label=label) for label, color in COLORS.items()]
    handles.append(Line2D([], [], color="#d6604d", linewidth=2, label="aim"))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)


def _draw_bar(axes: Axes, y: float, label: str, spread: table.Spread | None) -> None:
    """A bar from plain torch to the median with a whisker from the smallest to the largest run; a word for no run."""
    if spread is None:
        axes.text(1.02, y, f"{label}: none", va="center", fontsize=7, color="#d6604d")
        return
    whisker = [[spread.median - spread.low], [spread.high - spread.median]]
    axes.barh(y, spread.median - PLAIN, BAR_HEIGHT, left=PLAIN, color=COLORS[label])
    axes.errorbar(spread.median, y, xerr=whisker, color="black", elinewidth=0.8, capsize=2)
    axes.annotate(
        table.number(spread.median), (spread.high, y), (4, 0), textcoords="offset points", va="center", fontsize=8
    )
