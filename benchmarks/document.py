"""The part of `docs/benchmarks.md` that a session writes, between two markers."""

from __future__ import annotations

from benchmarks import table
from benchmarks.results import Session

BEGIN = "<!-- benchmarks:begin (written by benchmarks/run.py) -->"
END = "<!-- benchmarks:end -->"


def session_part(session: Session, chart_name: str) -> str:
    """Circumstances, chart and table of a session."""
    repeats = 1 + max((run.repeat for run in session.runs), default=0)
    smoke = "**A smoke run: too short for its figures to mean anything.**\n\n" if session.quick else ""
    facts = {
        "date": session.date,
        "command": f"`{session.command}`",
        "duration": f"{session.wall_s / 60:.0f} min, each benchmark {repeats} × in each environment",
        **session.machine,
        **{
            name: ", ".join(f"{package} {release}" for package, release in releases.items())
            for name, releases in session.releases.items()
        },
    }
    fact_lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    chart = f"![Ratios to plain torch, fork and base]({chart_name})"
    return f"{smoke}{fact_lines}\n\n{chart}\n\n{table.markdown(table.rows(session.runs))}"


def splice(document: str, part: str) -> str:
    """The document with `part` between its markers; raises `ValueError` when it has not each of them once, in order."""
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(
            f"expected the line {BEGIN!r} once and {END!r} once below it; put them where the table shall be"
        )
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"
