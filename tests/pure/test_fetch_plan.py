"""Plans for small models, decision by decision: what is fetched, prefetched, kept and released, and when.

Modules and parameters have one letter each; module ``a`` needs parameter ``a`` unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from deepspeed.runtime.zero.fetch_plan import (
    EMPTY_SEGMENT,
    Budgets,
    Decision,
    Gather,
    Need,
    Planner,
    Segment,
    fingerprint_of,
)
from deepspeed.runtime.zero.trace import Event, Step

LETTERS = "abcdefgh"
HUGE_NUMEL = 1_000_000
NUMEL = 10
"""Of each parameter, unless a test says otherwise."""
START = Step(Event.START, 0)
REDUCE = Step(Event.REDUCE, 0)
BACKWARD_END = Step(Event.BACKWARD_END, 0)


def numbers(letters: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(letter) for letter in letters)


def letters_of(gather: Gather | None) -> str:
    return "".join(LETTERS[param] for param in gather.params) if gather is not None else ""


def steps_of(text: str) -> list[Step]:
    """``a(b()c())`` are calls, ``^a`` is a backward, ``|`` a reduction, ``.`` the end of the backward."""
    steps, open_modules, pending = [START], [], iter(text)
    for letter in pending:
        if letter == ")":
            steps.append(Step(Event.LEAVE, open_modules.pop()))
        elif letter == "^":
            steps.append(Step(Event.BACKWARD, LETTERS.index(next(pending))))
        elif letter in ".|":
            steps.append(BACKWARD_END if letter == "." else REDUCE)
        elif letter != "(":
            open_modules.append(LETTERS.index(letter))
            steps.append(Step(Event.ENTER, open_modules[-1]))
    return steps


def planner(
    prefetch_numel: int = HUGE_NUMEL,
    live_numel: int = HUGE_NUMEL,
    reuse_numel: int = 0,
    numel: Mapping[str, int] | None = None,
    needs: Mapping[str, str] | None = None,
    inside: Mapping[str, str] | None = None,
) -> Planner:
    """``inside`` says for a module which modules contain it."""
    sizes = [(numel or {}).get(letter, NUMEL) for letter in LETTERS]
    wanted = {letter: letter for letter in LETTERS} | dict(needs or {})
    return Planner(
        Budgets(prefetch_numel, live_numel, reuse_numel),
        {
            LETTERS.index(module): Need(numbers(params), sum(sizes[p] for p in numbers(params)))
            for module, params in wanted.items()
            if params
        },
        sizes,
        {LETTERS.index(module): frozenset(numbers(around)) for module, around in (inside or {}).items()},
    )


def decision_at(segment: Segment, step: Step, occurrence: int = 0) -> Decision:
    return [decision for decision in segment.decisions if decision.step == step][occurrence]


def enters(segment: Segment, letter: str, occurrence: int = 0) -> Decision:
    return decision_at(segment, Step(Event.ENTER, LETTERS.index(letter)), occurrence)


def leaves(segment: Segment, letter: str) -> Decision:
    return decision_at(segment, Step(Event.LEAVE, LETTERS.index(letter)))


def fetches(segment: Segment) -> str:
    return " ".join(letters_of(decision.fetch) for decision in segment.decisions if decision.fetch)


def prefetches(segment: Segment) -> str:
    return " ".join(letters_of(decision.prefetch) for decision in segment.decisions if decision.prefetch)


def test_with_room_for_all_one_gather_brings_all() -> None:
    segment = planner().plan(steps_of("a()b()c()"))
    assert (prefetches(segment), fetches(segment)) == ("abc", "")
    assert [decision.wait for decision in segment.decisions] == [False, True, *[False] * 5]
    assert leaves(segment, "a").release == numbers("a")
    assert leaves(segment, "c").release == numbers("c")
    assert segment.complete


def test_without_prefetching_each_module_fetches_its_own() -> None:
    segment = planner(prefetch_numel=0).plan(steps_of("a()b()c()"))
    assert (prefetches(segment), fetches(segment)) == ("", "a b c")
    assert not any(decision.wait for decision in segment.decisions)


def test_a_prefetch_stops_at_its_budget() -> None:
    segment = planner(prefetch_numel=2 * NUMEL).plan(steps_of("a()b()c()d()e()"))
    assert (prefetches(segment), fetches(segment)) == ("ab c de", "")


def test_what_was_prefetched_and_not_used_counts_until_half_a_bucket_is_free() -> None:
    segment = planner(prefetch_numel=4 * NUMEL).plan(steps_of("a()b()c()d()e()f()g()"))
    assert prefetches(segment) == "abcd ef g"
    assert letters_of(enters(segment, "b").prefetch) == "ef"
    assert enters(segment, "a").prefetch is None


def test_what_an_earlier_plan_prefetched_counts_as_well() -> None:
    plan = planner(prefetch_numel=2 * NUMEL, reuse_numel=HUGE_NUMEL)
    steps = steps_of("a()b()c()d()")
    assert letters_of(plan.plan(steps, idle=numbers("ab")).decisions[0].prefetch) == "cd"
    segment = plan.plan(steps, idle=numbers("ab"), ahead=numbers("ab"))
    assert segment.decisions[0].prefetch is None
    assert prefetches(segment) == "c d"


def test_a_prefetch_does_not_skip_what_does_not_fit() -> None:
    """Small ``c`` would fit, but it would be whole while big ``b`` still is to be fetched."""
    segment = planner(prefetch_numel=NUMEL, numel={"b": 5 * NUMEL}).plan(steps_of("a()b()c()"))
    assert (prefetches(segment), fetches(segment)) == ("a c", "b")
    assert letters_of(enters(segment, "b").prefetch) == "c"


def test_what_is_live_bounds_a_prefetch() -> None:
    segment = planner(live_numel=2 * NUMEL).plan(steps_of("a()b()c()d()"))
    assert (prefetches(segment), fetches(segment)) == ("ab c d", "")
    # Room comes where a and b are left.
    assert letters_of(leaves(segment, "a").prefetch) == "c"
    assert segment.over_budget == ()


def test_a_module_that_needs_more_than_may_be_live_is_named() -> None:
    segment = planner(prefetch_numel=0, live_numel=15, needs={"b": "bc"}).plan(steps_of("a()b()d()"))
    assert segment.over_budget == ((LETTERS.index("b"), 20),)
    assert letters_of(enters(segment, "b").fetch) == "bc"


def test_modules_around_count_where_more_is_needed_than_may_be_live() -> None:
    segment = planner(live_numel=2 * NUMEL).plan(steps_of("a(b(c()))"))
    assert segment.over_budget == ((LETTERS.index("c"), 3 * NUMEL),)


def test_no_room_at_all_still_runs_every_module() -> None:
    segment = planner(live_numel=0).plan(steps_of("a()b()"))
    assert (prefetches(segment), fetches(segment)) == ("", "a b")
    assert dict(segment.over_budget) == {0: NUMEL, 1: NUMEL}


@pytest.mark.parametrize(
    ("reuse_numel", "kept"),
    # From the end of a's first use to its second b's elements and c's are needed.
    [(0, False), (2 * NUMEL, False), (2 * NUMEL + 1, True), (HUGE_NUMEL, True)],
)
def test_what_is_used_again_soon_enough_stays_whole(reuse_numel: int, kept: bool) -> None:
    segment = planner(prefetch_numel=0, reuse_numel=reuse_numel).plan(steps_of("a()b()c()a()"))
    assert fetches(segment) == ("a b c" if kept else "a b c a")
    assert (decision_at(segment, Step(Event.LEAVE, 0), 0).release == ()) == kept
    assert decision_at(segment, Step(Event.LEAVE, 0), 1).release == numbers("a")


def test_what_stays_whole_makes_room_for_what_is_needed_furthest_use_first() -> None:
    segment = planner(prefetch_numel=0, live_numel=3 * NUMEL, reuse_numel=HUGE_NUMEL).plan(
        steps_of("a()b()c()d()c()b()a()")
    )
    assert enters(segment, "d").release == numbers("a")
    assert fetches(segment) == "a b c d a"
    assert segment.over_budget == ()


def test_a_parameter_of_two_modules_is_gathered_once_while_one_of_them_runs() -> None:
    segment = planner(needs={"a": "ab", "b": "b"}).plan(steps_of("a(b())c()"))
    assert prefetches(segment) == "abc"
    assert leaves(segment, "b").release == ()
    assert leaves(segment, "a").release == numbers("ab")


def test_a_backward_goes_on_with_what_the_forward_left_and_ends_with_nothing() -> None:
    segment = planner(reuse_numel=1).plan(steps_of("a()b()^b^a."))
    assert leaves(segment, "b").release == ()
    backward_of_a = decision_at(segment, Step(Event.BACKWARD, 0))
    assert backward_of_a.release == numbers("b")
    assert decision_at(segment, BACKWARD_END).release == numbers("a")


def test_the_backward_of_a_module_inside_does_not_end_that_of_the_one_around() -> None:
    segment = planner(inside={"b": "a"}).plan(steps_of("a(b())c()^c^a^b."))
    assert decision_at(segment, Step(Event.BACKWARD, 0)).release == numbers("c")
    assert decision_at(segment, Step(Event.BACKWARD, 1)).release == ()
    assert decision_at(segment, BACKWARD_END).release == numbers("ab")


def test_the_backward_of_an_external_parameter_does_not_end_that_of_its_module() -> None:
    external = -2
    plan = Planner(
        Budgets(HUGE_NUMEL, HUGE_NUMEL, 0),
        {0: Need((0,), NUMEL), 1: Need((1,), NUMEL), external: Need((2,), NUMEL)},
        [NUMEL] * 3,
        owners={external: 0},
    )
    steps = [Step(Event.BACKWARD, node) for node in (0, external, 1)]
    segment = plan.plan([START, *steps, BACKWARD_END])
    assert [decision.release for decision in segment.decisions] == [(), (), (), (0, 2), (1,)]


def test_the_backward_of_a_module_without_parameters_of_its_own_holds_nothing() -> None:
    """It is a node because of the parameters that it reads of other modules."""
    segment = planner(needs={"a": ""}, inside={"b": "a"}).plan(steps_of("a(b())^a^b."))
    assert prefetches(segment) == "b b"
    assert decision_at(segment, BACKWARD_END).release == numbers("b")


def test_what_a_backward_under_way_holds_is_released_as_it_ends() -> None:
    """Ranks came to agree in the middle of it, inside ``a``."""
    steps = steps_of("a(b())^a^b.")
    middle = steps.index(Step(Event.BACKWARD, LETTERS.index("b")))
    segment = planner(inside={"b": "a"}).plan(steps[middle:], held=numbers("a"))
    assert decision_at(segment, BACKWARD_END).release == numbers("ab")


def test_what_modules_around_hold_stays_until_they_end() -> None:
    steps = steps_of("a(b()c())d()")
    middle = steps.index(Step(Event.ENTER, LETTERS.index("b")))
    segment = planner(prefetch_numel=0).plan(steps[middle:], held=numbers("a"))
    assert fetches(segment) == "c d"
    assert leaves(segment, "b").release == numbers("b")
    assert leaves(segment, "a").release == numbers("a")


def test_what_is_whole_by_chance_is_used_if_it_is_wanted_and_else_released_at_once() -> None:
    segment = planner(prefetch_numel=0, reuse_numel=2 * NUMEL).plan(steps_of("a()b()c()d()"), idle=numbers("bdh"))
    assert segment.decisions[0].release == numbers("dh")
    assert fetches(segment) == "a c d"


def test_nothing_is_prefetched_over_the_end_of_a_backward() -> None:
    segment = planner().plan(steps_of("a()^a.b()"))
    assert decision_at(segment, BACKWARD_END).release == numbers("a")
    assert enters(segment, "a").prefetch is None
    assert letters_of(decision_at(segment, BACKWARD_END).prefetch) == "b"


def test_a_segment_ends_before_a_module_at_which_ranks_differ() -> None:
    steps = steps_of("a()b()c()")
    segment = planner().plan(steps, unsteady={LETTERS.index("b")})
    assert [decision.step for decision in segment.decisions] == steps[:3]
    assert not segment.complete
    assert prefetches(segment) == "a"


def test_a_segment_may_begin_at_a_module_at_which_ranks_differ() -> None:
    steps = steps_of("a()b()c()")[1:]
    segment = planner().plan(steps, unsteady={LETTERS.index("c")})
    assert [decision.step for decision in segment.decisions] == steps[:4]
    assert planner().plan(steps, unsteady={LETTERS.index("a")}) == EMPTY_SEGMENT


def test_reductions_have_numbers_of_their_own() -> None:
    """That a module's number is that of an event ends nothing."""
    segment = planner().plan(steps_of("b()^b|."), unsteady={REDUCE.node, BACKWARD_END.node})
    assert segment.complete


@pytest.mark.parametrize("steps", [[], [START]])
def test_nothing_ahead_is_no_plan(steps: list[Step]) -> None:
    assert planner().plan(steps) == EMPTY_SEGMENT
    assert EMPTY_SEGMENT.fingerprint == 0


def test_plans_are_told_apart_by_what_they_gather_and_where_they_end() -> None:
    steps = steps_of("a()b()c()")
    fingerprints = [
        planner().plan(steps).fingerprint,
        planner(prefetch_numel=0).plan(steps).fingerprint,
        planner(prefetch_numel=NUMEL).plan(steps).fingerprint,
        planner().plan(steps, idle=numbers("a")).fingerprint,
        planner().plan(steps[:-1]).fingerprint,
        planner().plan(steps[:-2]).fingerprint,
        planner().plan(steps, unsteady={LETTERS.index("c")}).fingerprint,
    ]
    # The last two have the same steps and gathers; only one goes to the end of its path.
    assert len(planner().plan(steps[:-2]).decisions) == len(steps) - 2
    assert len(set(fingerprints)) == len(fingerprints)
    assert 0 not in fingerprints
    assert planner().plan(steps).fingerprint == fingerprints[0]


def test_fingerprints_are_the_same_in_every_process() -> None:
    assert fingerprint_of([0, 1, -5, 2**62]) == 0x152F7326C6FBA807
    assert fingerprint_of([1, 2]) != fingerprint_of([2, 1])
    assert 0 < fingerprint_of([]) < 2**63
