"""Any passes: a trace never raises, never says that the model is where it is not, and learns what comes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from deepspeed.runtime.zero.trace import Event, Step, Trace
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = 300
STARTS = st.builds(Step, st.just(Event.START), st.integers(0, 2))
STEPS = st.builds(Step, st.sampled_from([event for event in Event if event is not Event.START]), st.integers(0, 4))


@dataclass(frozen=True)
class Pass:
    start: Step
    steps: tuple[Step, ...]
    abandoned: bool = False
    clears: bool = False
    """The modules change after it."""


ROUTES = st.lists(st.lists(STEPS, max_size=8).map(tuple), min_size=1, max_size=5)


@st.composite
def programs(draw: st.DrawFn) -> list[Pass]:
    """Passes along a few routes, so that they come again, some with steps left out or put in."""
    routes = draw(ROUTES)
    passes = []
    for _ in range(draw(st.integers(1, 10))):
        steps = list(draw(st.sampled_from(routes)))
        for position in draw(st.lists(st.integers(0, 8), max_size=2)):
            if draw(st.booleans()):
                steps.insert(position, draw(STEPS))
            else:
                del steps[position : position + 2]
        rarely = st.integers(0, 9).map(lambda number: number == 0)
        passes.append(Pass(draw(STARTS), tuple(steps), abandoned=draw(rarely), clears=draw(rarely)))
    return passes


class Kept:
    """The known paths, as their description says: distinct, the latest at the end, the oldest forgotten."""

    def __init__(self, max_paths: int, max_steps: int) -> None:
        self.max_paths = max_paths
        self.max_steps = max_steps
        self.paths: list[tuple[Step, ...]] = []

    def add(self, steps: tuple[Step, ...]) -> None:
        if 2 <= len(steps) <= self.max_steps:
            self.paths = [path for path in self.paths if path != steps][-self.max_paths :] + [steps]
            self.paths = self.paths[-self.max_paths :]


@settings(max_examples=EXAMPLES, deadline=None)
@given(program=programs(), max_paths=st.integers(1, 4), max_steps=st.integers(2, 12))
def test_whatever_happens_the_place_is_where_the_model_is(program: list[Pass], max_paths: int, max_steps: int) -> None:
    trace = Trace(max_paths=max_paths, max_steps=max_steps)
    kept = Kept(max_paths, max_steps)
    surprises = 0
    under_way: tuple[Step, ...] = ()
    for each in program:
        kept.add(under_way)
        trace.begin(each.start)
        assert [path.steps for path in trace.paths] == kept.paths
        assert trace.place is None or trace.place.path.steps[trace.place.index] == each.start
        for step in each.steps:
            before = trace.place
            expected = before is not None and before.ahead[:1] == (step,)
            assert trace.follow(step) == expected
            surprises += not expected
            assert trace.surprises == surprises
            place = trace.place
            known = any(step in path for path in kept.paths)
            assert (place is not None) >= known, "the step is on a path and was not found"
            if place is not None:
                assert place.path.steps[place.index] == step
                assert place.ahead == place.path.steps[place.index + 1 :]
            if expected:
                assert place == (before.path, before.index + 1)
        under_way = (each.start, *each.steps)
        assert tuple(trace.recorded) == under_way[: max_steps + 1]
        if each.abandoned:
            trace.abandon()
            under_way = ()
        if each.clears:
            trace.clear()
            kept.paths = []
            under_way = ()
            assert trace.paths == ()
        if not under_way:
            assert trace.place is None
            assert list(trace.recorded) == []


PERIODS = st.lists(st.tuples(STARTS, st.lists(STEPS, min_size=1, max_size=6).map(tuple)), min_size=1, max_size=8)
"""No longer than the number of passes that are compared to tell the next one. A path may come more than once."""


@settings(max_examples=EXAMPLES, deadline=None)
@given(period=PERIODS)
def test_passes_that_take_turns_are_no_surprise_after_two_rounds(period: list[tuple[Step, tuple[Step, ...]]]) -> None:
    trace = Trace(max_paths=len(set(period)))
    for number, (start, steps) in enumerate(period * 5):
        if number == 2 * len(period):
            trace.surprises = 0
        trace.begin(start)
        for step in steps:
            trace.follow(step)
    assert trace.surprises == 0


class CountedNode(int):
    """A module's number that counts how often it is compared or hashed."""

    looks: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        CountedNode.looks += 1
        return int.__eq__(self, other)

    def __hash__(self) -> int:
        CountedNode.looks += 1
        return int.__hash__(self)


@pytest.mark.parametrize("n_paths", [1, 4, 16])
def test_an_expected_step_costs_one_look_however_many_paths_are_known(n_paths: int) -> None:
    trace = Trace()

    def route(number: int) -> list[Step]:
        # New objects each time, since Python does not compare an object with itself.
        return [Step(Event.ENTER, CountedNode(node)) for node in (*range(50), 100 + number)]

    for number in [*range(n_paths), n_paths - 1]:
        trace.begin(Step(Event.START, 0))
        for step in route(number):
            trace.follow(step)
    trace.begin(Step(Event.START, 0))
    assert len(trace.paths) == n_paths
    steps = route(n_paths - 1)
    CountedNode.looks = 0
    assert all(trace.follow(step) for step in steps)
    assert CountedNode.looks == len(steps)
