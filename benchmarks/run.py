"""Runs the benchmarks in two environments by turns and writes results, table and chart.

For example: python benchmarks/run.py --fork .venv/bin/python --base .venv-base/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, so that its modules have the same names here as in the tests

from benchmarks import case, document, machine, results, table  # noqa: E402
from benchmarks.environment import Environment, own_extensions, require_comparable  # noqa: E402
from benchmarks.launch import Order, Outcome, launch  # noqa: E402

WARM_UP = "benchmarks.warm_up"


@dataclass(frozen=True)
class Outputs:
    """Where a session's results go."""

    results: Path
    document: Path
    chart: Path

    @staticmethod
    def of(out: Path | None, quick: bool) -> Outputs:
        """The committed files, or files of the same names in a folder of the user's or of a smoke run."""
        if out is None and not quick:
            docs = ROOT / "docs"
            return Outputs(ROOT / "benchmarks" / "results.json", docs / "benchmarks.md", docs / "benchmarks.png")
        folder = out or ROOT / "build" / "benchmarks"
        folder.mkdir(parents=True, exist_ok=True)
        return Outputs(folder / "results.json", folder / "benchmarks.md", folder / "benchmarks.png")


def main() -> int:
    """Returns the exit status: 1 where a run failed, 2 where nothing could be run."""
    arguments = _parse_arguments()
    signal.signal(signal.SIGTERM, _raise_exit)  # so that the launcher ends its ranks
    outputs = Outputs.of(arguments.out, arguments.quick)
    try:
        session = results.read(outputs.results) if arguments.render else _measure(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: interrupted; nothing has been written", file=sys.stderr)
        return 128 + signal.SIGINT
    if not arguments.render:
        results.write(session, outputs.results)
    _render(session, outputs)
    return 1 if session.failed else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fork", type=Path, metavar="PYTHON", help="interpreter that has the fork installed")
    parser.add_argument("--base", type=Path, metavar="PYTHON", help="interpreter that has the base release installed")
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="CASE", help="files of benchmarks/cases/; default: all"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="runs in each environment; default: 2, quick: 1")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results.json, benchmarks.md and benchmarks.png; default: benchmarks/ and docs/, "
        "or build/benchmarks/ with --quick",
    )
    parser.add_argument("--quick", action="store_true", help="smoke run of a minute or two; its figures mean nothing")
    parser.add_argument("--render", action="store_true", help="only write table and chart of the results there are")
    arguments = parser.parse_args()
    if not arguments.render and (arguments.fork is None or arguments.base is None):
        parser.error("--fork and --base are needed, except with --render")
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 2
    if arguments.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {arguments.repeats}")
    return arguments


def _measure(arguments: argparse.Namespace) -> results.Session:
    """Runs each case at each number of ranks by turns: fork, base, fork, base."""
    begin_s = time.monotonic()
    cases = case.discover(arguments.cases)
    environments = (
        Environment.probe(table.FORK, arguments.fork),
        Environment.probe(table.BASE, arguments.base),
    )
    require_comparable(*environments)
    machine_facts = machine.describe()
    with own_extensions(environments):
        runs = _run_cases(cases, environments, arguments.repeats, arguments.quick)
    return results.Session(
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        quick=arguments.quick,
        machine=machine_facts,
        releases={each.label: {"Python": each.python} | each.releases for each in environments},
        wall_s=round(time.monotonic() - begin_s, 1),
        runs=runs,
    )


def _run_cases(
    cases: dict[str, case.Case], environments: Sequence[Environment], repeats: int, quick: bool
) -> tuple[results.Run, ...]:
    """The runs of all cases, failed ones included, told one by one on the terminal."""
    cold = {environment.label: _warm_up(environment) for environment in environments}
    plan = [
        (name, Order(environment, f"{case.CASES_PACKAGE}.{name}", world_size, each.time_limit_s, quick), repeat)
        for name, each in cases.items()
        for world_size in each.world_sizes_of_run(quick)
        for repeat in range(repeats)
        for environment in environments
    ]
    runs: list[results.Run] = []
    for index, (name, order, repeat) in enumerate(plan, start=1):
        label = order.environment.label
        outcome = cold[label] or _launch(order)
        runs.append(
            results.Run(
                case=name,
                title=cases[name].title,
                environment=label,
                world_size=order.world_size,
                repeat=repeat,
                wall_s=round(outcome.wall_s, 1),
                figures=outcome.figures,
                failure=outcome.failure,
            )
        )
        progress = f"[{index:>2}/{len(plan)}] {name}, ranks {order.world_size}, {label}, run {repeat + 1}"
        print(f"{progress}: {outcome.failure or 'done'} ({outcome.wall_s:.1f} s)", file=sys.stderr, flush=True)
    return tuple(runs)


def _warm_up(environment: Environment) -> Outcome | None:
    """Builds the ops of an environment; where that fails, the outcome that stands for all runs in it."""
    print(f"warming up {environment.label}: compiles its ops where they are missing", file=sys.stderr, flush=True)
    warm_up = case.load(WARM_UP)
    outcome = _launch(Order(environment, WARM_UP, max(warm_up.world_sizes), warm_up.time_limit_s, quick=False))
    return None if outcome.failure is None else Outcome(0.0, (), f"warm-up: {outcome.failure}")


def _launch(order: Order) -> Outcome:
    """Runs an order and shows what its ranks had to say when it failed."""
    outcome = launch(order)
    if outcome.failure is not None:
        print(outcome.detail, file=sys.stderr)
    return outcome


def _render(session: results.Session, outputs: Outputs) -> None:
    """Writes the chart and the document, which a new folder does not have yet, and prints the table."""
    from benchmarks import chart  # matplotlib takes a second that --help and a wrong argument need not wait for

    rows = table.rows(session.runs)
    chart.draw(rows, outputs.chart)
    part = document.session_part(session, outputs.chart.name)
    if not outputs.document.exists():
        outputs.document.write_text(f"# Benchmarks\n\n{document.BEGIN}\n{document.END}\n", encoding="utf-8")
    text = outputs.document.read_text(encoding="utf-8")
    outputs.document.write_text(document.splice(text, part), encoding="utf-8")
    print(table.markdown(rows))
    print(f"\nwritten: {', '.join(str(path) for path in (outputs.results, outputs.document, outputs.chart))}")


def _raise_exit(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main())
