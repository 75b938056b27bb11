"""What a trace expects after what it has seen, told by examples of one letter per module."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.zero.trace import Event, Step, Trace

START = Step(Event.START, 0)
OTHER_START = Step(Event.START, 1)


def step(module: str) -> Step:
    return Step(Event.ENTER, ord(module))


def take(trace: Trace, modules: str, start: Step = START) -> str:
    """One pass. Returns the modules that were a surprise."""
    trace.begin(start)
    return go_on(trace, modules)


def go_on(trace: Trace, modules: str) -> str:
    return "".join(module for module in modules if not trace.follow(step(module)))


def take_all(trace: Trace, *passes: str) -> str:
    """Several passes. Returns the surprises of all, with a bar between passes."""
    return "|".join(take(trace, modules) for modules in passes)


def expected_next(trace: Trace) -> str:
    """The modules that the trace expects from here to the end of the pass."""
    assert trace.place is not None
    return "".join(chr(expected.node) for expected in trace.place.ahead)


def test_the_first_pass_is_unknown_and_recorded() -> None:
    trace = Trace()
    assert take(trace, "abc") == "abc"
    assert trace.place is None
    assert list(trace.recorded) == [START, step("a"), step("b"), step("c")]
    assert trace.paths == ()
    assert trace.surprises == 3


def test_the_second_pass_is_expected_step_by_step() -> None:
    trace = Trace()
    take(trace, "abcab")
    trace.begin(START)
    assert expected_next(trace) == "abcab"
    for done, module in enumerate("abcab", 1):
        assert trace.follow(step(module))
        assert expected_next(trace) == "abcab"[done:]
    assert trace.place.path.steps == (START, *map(step, "abcab"))


def test_a_pass_that_ends_early_is_no_surprise_and_a_path_of_its_own() -> None:
    trace = Trace()
    assert take_all(trace, "abc", "ab", "ab") == "abc||"
    trace.begin(START)
    assert expected_next(trace) == "ab"
    assert len(trace.paths) == 2


def test_a_longer_pass_is_a_surprise_only_beyond_the_end() -> None:
    assert take_all(Trace(), "ab", "abcd", "abcd") == "ab|cd|"


def test_a_skipped_module_is_a_surprise_once_and_the_rest_expected() -> None:
    trace = Trace()
    take(trace, "abcdef")
    trace.begin(START)
    assert go_on(trace, "abd") == "d"
    assert expected_next(trace) == "ef"


def test_a_skip_forward_goes_to_the_nearest_occurrence() -> None:
    trace = Trace()
    take(trace, "abxcxd")
    trace.begin(START)
    assert go_on(trace, "ax") == "x"
    assert expected_next(trace) == "cxd"


def test_a_skip_goes_forward_even_if_the_module_came_before() -> None:
    trace = Trace()
    take(trace, "xabxcd")
    trace.begin(START)
    assert go_on(trace, "xax") == "x"
    assert expected_next(trace) == "cd"


def test_after_an_unknown_module_the_path_is_found_again() -> None:
    trace = Trace()
    take(trace, "abcd")
    trace.begin(START)
    assert go_on(trace, "abX") == "X"
    assert trace.place is None
    assert go_on(trace, "cd") == "c"
    assert trace.place is not None


def test_a_repeated_module_goes_back_on_the_path() -> None:
    trace = Trace()
    take(trace, "abcd")
    trace.begin(START)
    assert go_on(trace, "abcb") == "b"
    assert expected_next(trace) == "cd"


def test_a_known_branch_beats_a_skip_on_the_expected_path() -> None:
    """``axb`` was seen, so after ``a`` an ``x`` means that branch, not the later ``x`` of the other."""
    trace = Trace()
    take_all(trace, "axb", "acxd", "acxd", "acxd")
    trace.begin(START)
    assert expected_next(trace) == "acxd"
    assert go_on(trace, "ax") == "x"
    assert expected_next(trace) == "b"


@pytest.mark.parametrize(("modules", "rest"), [("?pm", "Yqr"), ("?bm", "XnopmYqr"), ("?m", "XnopmYqr")])
def test_the_place_with_most_in_common_is_taken_then_the_first(modules: str, rest: str) -> None:
    trace = Trace()
    take(trace, "abmXnopmYqr")
    trace.begin(START)
    # An unknown module first, so that the place on the path is lost and only the context says which m it is.
    assert go_on(trace, modules).startswith("?")
    assert expected_next(trace) == rest


@pytest.mark.parametrize(
    "period",
    [
        ("ab",),
        ("axc", "ayc"),
        ("abc", "ac"),
        ("a", "abc", "ab"),
        ("axbyc", "axbc", "abyc"),
        ("ab", "abb", "abbb"),
        # The same path twice in a period: what came before it tells what comes next.
        ("ab", "ab", "ac"),
        ("ab", "ac", "ab", "ad", "ab", "ab"),
    ],
)
def test_passes_that_take_turns_are_no_surprise_after_two_rounds(period: tuple[str, ...]) -> None:
    trace = Trace()
    take_all(trace, *period, *period)
    assert not take_all(trace, *period * 3).strip("|")


def test_data_dependent_routes_are_a_surprise_only_where_they_part() -> None:
    """Any order of known routes: one surprise where another expert comes, none once the routes meet again."""
    trace = Trace()
    routes = [f"a{expert}bc{later}d" for expert, later in itertools.product("12", "34")]
    take_all(trace, *routes)
    for modules in [*routes[::-1], routes[2], routes[0], routes[3], routes[3], routes[1]]:
        assert set(take(trace, modules)) <= set("1234")


def test_passes_of_two_kinds_do_not_mix() -> None:
    trace = Trace()
    take(trace, "abc", START)
    take(trace, "xyz", OTHER_START)
    for _ in range(3):
        trace.begin(START)
        assert expected_next(trace) == "abc"
        assert go_on(trace, "abc") == ""
        trace.begin(OTHER_START)
        assert expected_next(trace) == "xyz"
        assert go_on(trace, "xyz") == ""


def test_a_kind_that_never_came_is_not_expected_to_be_like_another() -> None:
    trace = Trace()
    take(trace, "abc", START)
    trace.begin(OTHER_START)
    assert trace.place is None
    assert not trace.follow(step("a"))
    # But it is found there, which is as good a guess as any.
    assert expected_next(trace) == "bc"


def test_only_so_many_paths_are_kept_and_the_oldest_goes() -> None:
    trace = Trace(max_paths=3)
    take_all(trace, "ab", "ac", "ad", "ab", "ae")
    trace.begin(START)
    kept = ["".join(chr(s.node) for s in path.steps[1:]) for path in trace.paths]
    assert kept == ["ad", "ab", "ae"]


def test_an_endless_pass_is_neither_stored_nor_kept() -> None:
    trace = Trace(max_steps=10)
    take(trace, "ab" * 500)
    assert len(trace.recorded) <= 11
    trace.begin(START)
    assert trace.paths == ()
    assert take_all(trace, "ab", "ab") == "ab|"


def test_the_longest_pass_that_is_allowed_is_kept() -> None:
    trace = Trace(max_steps=4)
    assert take_all(trace, "abc", "abc") == "abc|"
    assert take_all(trace, "abcd", "abcd") == "d|d"


def test_an_abandoned_pass_is_no_path() -> None:
    trace = Trace()
    take(trace, "abc")
    trace.begin(START)
    go_on(trace, "axq")
    trace.abandon()
    assert trace.place is None
    assert list(trace.recorded) == []
    trace.begin(START)
    assert len(trace.paths) == 1
    assert expected_next(trace) == "abc"


def test_a_cleared_trace_knows_nothing() -> None:
    trace = Trace()
    take_all(trace, "abc", "abd")
    trace.clear()
    assert trace.paths == ()
    assert trace.place is None
    assert take_all(trace, "abc", "abc") == "abc|"
    assert len(trace.paths) == 1


def test_a_pass_that_did_nothing_is_no_path() -> None:
    trace = Trace()
    trace.begin(START)
    trace.begin(START)
    assert trace.paths == ()


def test_steps_until_counts_in_this_pass_and_into_the_next() -> None:
    trace = Trace()
    take(trace, "abcab")
    trace.begin(START)
    assert trace.steps_until(step("a")) == 1
    go_on(trace, "ab")
    assert [trace.steps_until(step(module)) for module in "abc"] == [2, 3, 1]
    go_on(trace, "cab")
    # Six steps a pass, the start included.
    assert [trace.steps_until(step(module)) for module in "abc"] == [2, 3, 4]
    assert trace.steps_until(step("x")) is None


def test_steps_until_is_unknown_off_every_path() -> None:
    trace = Trace()
    take(trace, "ab")
    assert trace.steps_until(step("a")) is None


def next_pass(trace: Trace) -> str | None:
    place = trace.next_pass
    return None if place is None else "".join(chr(expected.node) for expected in place.ahead)


def test_next_pass_is_told_when_this_one_ends_as_a_known_one() -> None:
    trace = Trace()
    take(trace, "abc")
    assert next_pass(trace) is None, "nothing like it was seen before"
    take(trace, "ab")
    assert next_pass(trace) is None, "it may go on"
    go_on(trace, "c")
    assert next_pass(trace) == "abc"
    assert expected_next(trace) == "", "asking changes nothing"


def test_next_pass_of_alternating_ones_is_the_other_one() -> None:
    trace = Trace()
    for _ in range(2):
        take(trace, "ab", START)
        take(trace, "xyz", OTHER_START)
    assert next_pass(trace) == "ab"
    assert trace.next_pass is not None
    assert trace.next_pass.path.steps[0] == START
    take(trace, "ab", START)
    assert next_pass(trace) == "xyz"
