"""Any plan, carried out step by step: what runs is whole, budgets hold, nothing is wasted and nothing is left behind.

`Execution` carries a segment out knowing nothing of how it was planned. What a step holds comes from the calls that
are running, not from the planner's own view of which modules contain each other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from deepspeed.runtime.zero.fetch_plan import EMPTY_SEGMENT, Budgets, Decision, Gather, Need, Planner, Segment
from deepspeed.runtime.zero.trace import Event, Step
from hypothesis import event, given, settings
from hypothesis import strategies as st

EXAMPLES = 300
MAX_PARAMS = 6
MAX_NODES = 6
MAX_CHILD_CALLS = 3
MAX_STEPS = 60
HUGE_NUMEL = 1_000_000


@dataclass(frozen=True)
class Call:
    """One call of a module. Its external parameters are nodes of their own and run as long as it does."""

    number: int
    around: frozenset[int]
    """The calls that it happens in."""


@dataclass(frozen=True)
class Moment:
    """A step, and the call that takes it."""

    step: Step
    call: Call


NO_CALL = Call(-1, frozenset())


@dataclass(frozen=True)
class Model:
    """A tree of modules. Node ``n``'s module contains those of ``children[n]``; 0 is the root."""

    numel: tuple[int, ...]
    needs: dict[int, tuple[int, ...]]
    """Parameters of modules (numbers from 0 on) and of external nodes (below 0)."""
    owners: dict[int, int]
    ancestors: dict[int, frozenset[int]]
    children: dict[int, tuple[int, ...]]

    def planner(self, budgets: Budgets) -> Planner:
        needs = {node: Need(params, self.size(params)) for node, params in self.needs.items() if params}
        return Planner(budgets, needs, self.numel, self.ancestors, self.owners)

    def needed_by(self, step: Step) -> frozenset[int]:
        return frozenset(self.needs[step.node] if step.event in (Event.ENTER, Event.BACKWARD) else ())

    def size(self, params) -> int:
        return sum(self.numel[p] for p in params)


@dataclass
class Running:
    """The uses of nodes that are going on."""

    model: Model
    forward: list[tuple[int, int]] = field(default_factory=list)
    """(call, node)"""
    backward: list[tuple[int, int]] = field(default_factory=list)

    def end_before(self, moment: Moment) -> None:
        """End what is over as ``moment`` comes."""
        step, call = moment.step, moment.call
        if step.event is Event.LEAVE:
            self.forward.remove((call.number, step.node))
        elif step.event is Event.BACKWARD:
            # Only the calls around this one have operations left whose backward comes later.
            self.backward = [use for use in self.backward if use[0] == call.number or use[0] in call.around]
        elif step.event is Event.BACKWARD_END:
            self.backward.clear()

    def begin_with(self, moment: Moment) -> None:
        use = (moment.call.number, moment.step.node)
        if moment.step.event is Event.ENTER:
            self.forward.append(use)
        elif moment.step.event is Event.BACKWARD:
            self.backward.append(use)

    def holds(self) -> Counter[int]:
        return Counter(p for _, node in (*self.forward, *self.backward) for p in self.model.needs[node])


@dataclass(frozen=True)
class Situation:
    """What is asked of the planner."""

    model: Model
    budgets: Budgets
    moments: tuple[Moment, ...]
    """From the one that has just been agreed on to the end of the path."""
    before: tuple[Moment, ...]
    unsteady: frozenset[int]
    idle: tuple[int, ...]
    ahead: tuple[int, ...] = ()
    """Of these, what was prefetched and not used so far."""

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(moment.step for moment in self.moments)

    @property
    def stretch(self) -> tuple[Moment, ...]:
        """As far as ranks do not differ."""
        for index, moment in enumerate(self.moments):
            of_module = moment.step.event in (Event.ENTER, Event.LEAVE, Event.BACKWARD)
            if index and of_module and moment.step.node in self.unsteady:
                return self.moments[:index]
        return self.moments

    def running(self) -> Running:
        """What runs when the first of the moments has come, but not begun."""
        running = Running(self.model)
        for moment in self.before:
            running.end_before(moment)
            running.begin_with(moment)
        running.end_before(self.moments[0])
        return running

    def plan(self) -> Segment:
        running = self.running()
        held = tuple(running.holds().elements())
        in_backward = [node for _, node in running.backward]
        planner = self.model.planner(self.budgets)
        return planner.plan(self.steps, self.unsteady, held, self.idle, self.ahead, in_backward)


class Execution:
    """Carries a segment out and checks every decision."""

    def __init__(self, situation: Situation, segment: Segment) -> None:
        self.model = situation.model
        self.budgets = situation.budgets
        self.over_budget = dict(segment.over_budget)
        self.running = situation.running()
        self.arrived_ahead: set[int] = set()
        """Prefetched in this segment, and not used so far."""
        self.left_ahead = set(situation.ahead)
        """The same of segments before this one. It may turn out to be of no use."""
        self.in_flight: set[int] = set()
        first = situation.moments[0].step
        self.whole = {*self.running.holds(), *situation.idle, *self.model.needed_by(first)}

    def carry_out(self, decision: Decision, moment: Moment, is_first: bool) -> None:
        assert decision.step == moment.step
        if not is_first:  # What ends before the first moment has ended before it was planned.
            self.running.end_before(moment)
        holds = self.running.holds()
        need = self.model.needed_by(moment.step)

        for param in decision.release:
            assert holds[param] == 0, f"{param} is released while it is held"
            assert param in self.whole, f"{param} is released and not whole"
            assert param not in need, f"{param} is released and needed"
            assert param not in self.arrived_ahead, f"{param} was gathered ahead for nothing"
            self.whole.discard(param)
            self.left_ahead.discard(param)
        if decision.wait:
            assert self.in_flight, "waits for nothing"
            self.whole |= self.in_flight
            self.in_flight.clear()
        if decision.fetch is not None:
            assert not is_first, "what the first step needs was agreed on and is there"
            self.check_gather(decision.fetch)
            assert set(decision.fetch.params) <= need, "fetches at once what is not needed now"
            self.whole.update(decision.fetch.params)
        assert need <= self.whole, f"{need - self.whole} are not whole when {moment.step} runs"
        self.arrived_ahead -= need
        self.left_ahead -= need
        self.running.begin_with(moment)
        self.check_live(moment.step, is_first)

        if decision.prefetch is not None:
            self.check_gather(decision.prefetch)
            self.in_flight.update(decision.prefetch.params)
            self.arrived_ahead.update(decision.prefetch.params)
            assert self.model.size(self.arrived_ahead | self.left_ahead) <= self.budgets.prefetch_numel
            assert self.live_numel <= self.budgets.live_numel, "prefetches more than may be live"
        if moment.step.event is Event.BACKWARD_END:
            assert not self.in_flight, "in flight after the backward"
            assert not self.whole - {*self.running.holds()}, "whole after the backward"

    @property
    def live_numel(self) -> int:
        return self.model.size(self.whole | self.in_flight)

    def check_gather(self, gather: Gather) -> None:
        assert gather.params
        assert not self.in_flight, "a second gather in flight"
        assert len(set(gather.params)) == len(gather.params)
        assert not self.whole.intersection(gather.params), "gathers what is whole"

    def check_live(self, step: Step, is_first: bool) -> None:
        if self.live_numel <= self.budgets.live_numel:
            return
        assert not self.in_flight
        assert self.whole <= {*self.running.holds()}, "over the budget, and something could be released"
        assert is_first or self.over_budget[step.node] > self.budgets.live_numel

    def finish(self) -> None:
        assert not self.in_flight, "in flight where the segment ends"
        assert not self.arrived_ahead, "gathered ahead for nothing"


@st.composite
def models(draw: st.DrawFn) -> Model:
    numel = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=MAX_PARAMS)))
    some_params = st.lists(st.integers(0, len(numel) - 1), max_size=3, unique=True).map(tuple)
    n_nodes = draw(st.integers(1, MAX_NODES))
    needs = {node: draw(some_params) for node in range(n_nodes)}
    ancestors = {0: frozenset()}
    children: dict[int, tuple[int, ...]] = dict.fromkeys(range(n_nodes), ())
    for node in range(1, n_nodes):
        parent = draw(st.integers(0, node - 1))
        ancestors[node] = ancestors[parent] | {parent}
        children[parent] += (node,)
    owners = dict(enumerate(draw(st.lists(st.integers(0, n_nodes - 1), max_size=2)), start=2))
    owners = {-number: owner for number, owner in owners.items()}
    for external in owners:
        needs[external] = (draw(st.integers(0, len(numel) - 1)),)
    return Model(numel, needs, owners, ancestors, children)


@st.composite
def passes(draw: st.DrawFn, model: Model, trains: bool) -> tuple[Moment, ...]:
    """A forward with any calls of children, and its backward."""
    moments = [Moment(Step(Event.START, 0), NO_CALL)]
    calls = [0]

    def run(node: int, around: frozenset[int]) -> None:
        call = Call(calls[0], around)
        calls[0] += 1
        parts = [node, *(external for external, owner in model.owners.items() if owner == node)]
        moments.extend(Moment(Step(Event.ENTER, part), call) for part in parts)
        if model.children[node]:
            for child in draw(st.lists(st.sampled_from(model.children[node]), max_size=MAX_CHILD_CALLS)):
                if len(moments) < MAX_STEPS // 2:
                    run(child, around | {call.number})
        moments.extend(Moment(Step(Event.LEAVE, part), call) for part in reversed(parts))

    run(0, frozenset())
    if trains:
        # Externals are left before their module, so backwards their module comes first.
        left = [moment for moment in moments if moment.step.event is Event.LEAVE]
        for moment in reversed(left):
            if draw(st.integers(0, 5)) == 0:
                moments.append(Moment(Step(Event.REDUCE, 0), NO_CALL))
            moments.append(Moment(Step(Event.BACKWARD, moment.step.node), moment.call))
        moments.append(Moment(Step(Event.BACKWARD_END, 0), NO_CALL))
    return tuple(moments)


LIMITS = st.one_of(st.integers(0, 20), st.integers(0, 40), st.just(HUGE_NUMEL))
BUDGETS = st.builds(Budgets, prefetch_numel=LIMITS, live_numel=LIMITS, reuse_numel=LIMITS)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    model = draw(models())
    path = draw(passes(model, draw(st.booleans())))
    # Ranks agree on a plan where one begins to need something.
    begins = [i for i, moment in enumerate(path) if moment.step.event in (Event.START, Event.REDUCE)]
    begins += [i for i, moment in enumerate(path) if model.needed_by(moment.step)]
    at = draw(st.sampled_from(begins))
    unsteady = draw(st.frozensets(st.sampled_from(sorted(model.needs)), max_size=2))
    situation = Situation(model, draw(BUDGETS), path[at:], path[:at], unsteady, idle=())
    used = {*situation.running().holds(), *model.needed_by(path[at].step)}
    idle: list[int] = []
    for param in draw(st.lists(st.integers(0, len(model.numel) - 1), unique=True)):
        # Whoever left it whole kept to the budget as well.
        if param not in used and model.size([*used, *idle, param]) <= situation.budgets.live_numel:
            idle.append(param)
    ahead: list[int] = []
    for param in idle:
        if draw(st.booleans()) and model.size([*ahead, param]) <= situation.budgets.prefetch_numel:
            ahead.append(param)
    return replace(situation, idle=tuple(sorted(idle)), ahead=tuple(sorted(ahead)))


def check(situation: Situation) -> None:
    segment = situation.plan()
    stretch = situation.stretch
    if len(stretch) < 2:
        assert segment == EMPTY_SEGMENT
        return
    event(f"over budget: {bool(segment.over_budget)}")
    event(f"prefetches: {any(decision.prefetch for decision in segment.decisions)}")
    event(f"complete: {segment.complete}")
    assert segment.complete == (len(stretch) == len(situation.moments))
    assert len(segment.decisions) == len(stretch)
    execution = Execution(situation, segment)
    for index, (decision, moment) in enumerate(zip(segment.decisions, stretch)):
        execution.carry_out(decision, moment, is_first=index == 0)
    execution.finish()


@settings(max_examples=EXAMPLES, deadline=None)
@given(situation=situations())
def test_a_plan_carried_out_keeps_every_promise(situation: Situation) -> None:
    check(situation)


@settings(max_examples=EXAMPLES, deadline=None)
@given(situation=situations())
def test_the_ends_of_the_budgets_decide_who_fetches(situation: Situation) -> None:
    roomy = replace(situation, budgets=Budgets(HUGE_NUMEL, HUGE_NUMEL, HUGE_NUMEL))
    check(roomy)
    assert all(decision.fetch is None for decision in roomy.plan().decisions), "the model waits for a fetch"

    frugal = replace(situation, budgets=replace(situation.budgets, prefetch_numel=0), ahead=())
    check(frugal)
    for decision in frugal.plan().decisions:
        assert decision.prefetch is None or frugal.model.size(decision.prefetch.params) == 0


def gathers_of(segment: Segment) -> list[tuple[object, ...]]:
    return [
        (decision.step, *(gather and gather.params for gather in (decision.fetch, decision.prefetch)))
        for decision in segment.decisions
    ]


@settings(max_examples=EXAMPLES, deadline=None)
@given(situation=situations(), other_budgets=BUDGETS, other_unsteady=st.frozensets(st.integers(0, MAX_NODES)))
def test_fingerprints_are_equal_exactly_where_gathers_are(
    situation: Situation, other_budgets: Budgets, other_unsteady: frozenset[int]
) -> None:
    segment = situation.plan()
    assert situation.plan() == segment
    for other in (replace(situation, budgets=other_budgets), replace(situation, unsteady=other_unsteady)):
        there = other.plan()
        same = (gathers_of(segment), segment.complete) == (gathers_of(there), there.complete)
        assert (segment.fingerprint == there.fingerprint) == same
