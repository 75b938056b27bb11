"""From the raw runs of the benchmarks to table, chart data and document."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import document, results, table
from benchmarks.figure import TIMES_PLAIN, Aim, Better, Figure
from benchmarks.results import Run, Session


def ratio(value: float, aim: Aim | None = None) -> Figure:
    return Figure("ZeRO-3 / plain", value, TIMES_PLAIN, aim=aim)


def speed(value: float) -> Figure:
    return Figure("speed", value, "tokens/s", Better.HIGHER)


def run(
    environment: str,
    repeat: int,
    *figures_by_rank: tuple[Figure, ...],
    case: str = "forward",
    world_size: int = 1,
    failure: str | None = None,
) -> Run:
    return Run(case, f"title of {case}", environment, world_size, repeat, 1.5, figures_by_rank, failure)


def session(*runs: Run, quick: bool = False) -> Session:
    return Session(
        date="2026-01-02 03:04 UTC",
        command="python benchmarks/run.py --fork F --base B",
        quick=quick,
        machine={"processor": "a processor", "cores": "2"},
        releases={"fork": {"deepspeed": "0.19.8+z3.1"}, "base": {"deepspeed": "0.19.8"}},
        wall_s=120.0,
        runs=runs,
    )


def test_a_row_holds_median_and_extremes_of_the_runs_of_each_environment() -> None:
    runs = [run("fork", i, (ratio(value),)) for i, value in enumerate([3.0, 1.0, 2.5])]
    runs += [run("base", i, (ratio(value),)) for i, value in enumerate([6.0, 8.0, 10.0])]
    (row,) = table.rows(runs)
    assert row.fork.spread == table.Spread(median=2.5, low=1.0, high=3.0)
    assert row.base.spread == table.Spread(median=8.0, low=6.0, high=10.0)


def test_fork_over_base_pairs_the_runs_that_followed_each_other() -> None:
    # The machine became three times slower between the repeats; within each pair the fork takes half the time.
    runs = [run("fork", 0, (ratio(1.0),)), run("base", 0, (ratio(2.0),))]
    runs += [run("fork", 1, (ratio(3.0),)), run("base", 1, (ratio(6.0),))]
    (row,) = table.rows(runs)
    assert row.fork_over_base == table.Spread(0.5, 0.5, 0.5)


def test_the_value_of_a_run_is_that_of_the_rank_that_did_worst() -> None:
    runs = [run("fork", 0, (ratio(2.0), speed(30.0)), (ratio(5.0), speed(10.0)), world_size=2)]
    by_name = {row.figure.name: row.fork.spread for row in table.rows(runs) if row.figure is not None}
    assert by_name == {"ZeRO-3 / plain": table.Spread(5.0, 5.0, 5.0), "speed": table.Spread(10.0, 10.0, 10.0)}


def test_rows_keep_cases_and_numbers_of_ranks_apart_and_in_the_order_of_the_runs() -> None:
    runs = [
        run("fork", 0, (ratio(1.0),), case="training", world_size=2),
        run("fork", 0, (ratio(1.0),), case="forward", world_size=1),
        run("fork", 0, (ratio(1.0),), case="training", world_size=1),
    ]
    assert [(row.title, row.world_size) for row in table.rows(runs)] == [
        ("title of training", 2),
        ("title of forward", 1),
        ("title of training", 1),
    ]


def test_a_failure_in_one_environment_leaves_the_figures_of_the_other() -> None:
    (row,) = table.rows([run("fork", 0, (ratio(1.0),)), run("base", 0, failure="rank 1: OSError: disk full")])
    assert row.fork.spread is not None
    assert row.base == table.Cell(spread=None, failures=("rank 1: OSError: disk full",), run_count=1)
    assert row.fork_over_base is None
    assert "| failed: rank 1: OSError: disk full |" in table.markdown([row])


def test_a_case_that_failed_everywhere_is_one_row_of_reasons() -> None:
    (row,) = table.rows(
        [run("fork", 0, failure="no end after 300 s"), run("base", 0, failure="rank 0: ended by SIGSEGV")]
    )
    assert row.figure is None
    assert table.markdown([row]).splitlines()[-1] == (
        "| title of forward | – | 1 | failed: no end after 300 s | failed: rank 0: ended by SIGSEGV | – |  |"
    )


def test_a_failure_in_one_of_several_runs_is_told_beside_the_spread_of_the_others() -> None:
    runs = [run("fork", 0, (ratio(1.5),)), run("fork", 1, failure="x"), run("fork", 2, failure="x")]
    assert "| **1.50** (1.50–1.50), 2 of 3 failed: x |" in table.markdown(table.rows(runs))


@pytest.mark.parametrize(
    ("better", "value", "verdict"),
    [
        (Better.LOWER, 1.1, "≤ 1.1: met"),
        (Better.LOWER, 1.2, "≤ 1.1: not met"),
        (Better.HIGHER, 1.1, "≥ 1.1: met"),
        (Better.HIGHER, 1.0, "≥ 1.1: not met"),
    ],
)
def test_the_table_says_whether_the_fork_meets_an_aim(better: Better, value: float, verdict: str) -> None:
    figure = Figure("f", value, "s", better, Aim(1.1))
    assert table.markdown(table.rows([run("fork", 0, (figure,))])).endswith(f"| {verdict} |")


def test_an_aim_is_not_judged_where_only_the_base_ran() -> None:
    runs = [run("fork", 0, failure="x"), run("base", 0, (ratio(1.0, Aim(1.1, note="on one node")),))]
    assert table.markdown(table.rows(runs)).endswith("| ≤ 1.1 (on one node) |")


def test_the_chart_has_a_bar_for_each_ratio_to_plain_torch_and_for_nothing_else() -> None:
    runs = [
        run("fork", 0, (ratio(2.0, Aim(3.0)), speed(10.0)), world_size=2),
        run("base", 0, (ratio(8.0, Aim(3.0)), speed(2.0)), world_size=2),
        run("fork", 0, failure="x", case="training"),
    ]
    assert table.bars(table.rows(runs)) == (
        table.Bar(
            label="title of forward\nZeRO-3 / plain, 2 ranks",
            fork=table.Spread(2.0, 2.0, 2.0),
            base=table.Spread(8.0, 8.0, 8.0),
            aim=Aim(3.0),
        ),
    )


def test_a_text_from_an_error_cannot_break_the_table() -> None:
    markdown = table.markdown(table.rows([run("fork", 0, failure="a | b\nc")]))
    assert "failed: a \\| b c" in markdown
    assert len(markdown.splitlines()) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00123456, "0.00123"),
        (0.9996, "1.00"),
        (1.0, "1.00"),
        (18.27, "18.3"),
        (185.4, "185"),
        (12345.6, "12346"),
        (0.0, "0"),
    ],
)
def test_numbers_have_three_significant_digits_and_no_exponent(value: float, text: str) -> None:
    assert table.number(value) == text


def test_results_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    before = session(
        run("fork", 0, (ratio(1.25, Aim(1.1, "note")), speed(3.0)), (ratio(1.5), speed(2.0)), world_size=2),
        run("base", 0, failure="rank 0: “×” went wrong"),
    )
    results.write(before, tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == before
    assert before.failed


def test_results_of_another_format_are_rejected_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"format": 0, "runs": []}')
    with pytest.raises(ValueError, match=r"expected results of format 1, got 0; run the benchmarks again"):
        results.read(path)


def test_the_part_of_the_document_tells_the_circumstances() -> None:
    part = document.session_part(session(run("fork", 0, (ratio(2.0),)), run("fork", 1, (ratio(2.0),))), "chart.png")
    for fact in (
        "- date: 2026-01-02 03:04 UTC",
        "- command: `python benchmarks/run.py --fork F --base B`",
        "- duration: 2 min, each benchmark 2 × in each environment",
        "- processor: a processor",
        "- fork: deepspeed 0.19.8+z3.1",
        "![Ratios to plain torch, fork and base](chart.png)",
    ):
        assert fact in part.splitlines()
    assert "smoke run" not in part


def test_figures_of_a_smoke_run_are_marked_as_such() -> None:
    assert document.session_part(session(quick=True), "chart.png").startswith("**A smoke run")


def test_splicing_replaces_what_is_between_the_markers_and_nothing_else() -> None:
    text = f"above\n{document.BEGIN}\nold\n{document.END}\nbelow\n"
    once = document.splice(text, "new")
    assert once == f"above\n{document.BEGIN}\n\nnew\n\n{document.END}\nbelow\n"
    assert document.splice(once, "new") == once


@pytest.mark.parametrize(
    "text",
    ["", document.BEGIN, f"{document.END}\n{document.BEGIN}", f"{document.BEGIN}\n{document.BEGIN}\n{document.END}"],
)
def test_a_document_without_its_markers_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="benchmarks:begin"):
        document.splice(text, "new")
