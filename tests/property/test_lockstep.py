"""Virtual ranks that go their own ways get through, meet again where their ways do, and else are told so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from deepspeed.runtime.zero.lockstep import PERSISTENT, Message, Point, Resolution, agree_on_gradients, resolve
from hypothesis import event, given, settings
from hypothesis import strategies as st

EXAMPLES = 300
MAX_BLOCKS = 4
EXPERTS = 4
"""Modules of a block of which each rank runs any, in any order, perhaps more than once."""
STRIDE = EXPERTS + 1
"""Block ``b`` has the experts ``b * STRIDE`` and up; a module that all ranks run follows them."""

Place = tuple[Point, int]


def steady_node(block: int) -> int:
    return block * STRIDE + EXPERTS


@dataclass
class VirtualRank:
    """Wants to get through its places, in this order."""

    places: Sequence[Place]
    needs: Sequence[bool]
    done: int = 0

    @property
    def is_through(self) -> bool:
        return self.done == len(self.places)

    def message(self) -> Message:
        point, node = self.places[self.done]
        return Message(point, node, needs=self.needs[self.done])


@dataclass
class Rounds:
    """Runs all ranks, which see the same messages and keep the same record of unsteady modules."""

    ranks: Sequence[VirtualRank]
    unsteady: set[int] = field(default_factory=set)
    agreed: list[Place] = field(default_factory=list)
    count: int = 0

    def run(self) -> None:
        """Until all are through.

        Raises:
            AssertionError: they cannot get through.
        """
        while not all(rank.is_through for rank in self.ranks):
            assert not any(rank.is_through for rank in self.ranks), "some are through, and the others need them"
            messages = [rank.message() for rank in self.ranks]
            resolution = resolve(messages, self.unsteady)
            self.count += 1
            assert resolution.going, f"nobody can go on from {[message.place for message in messages]}"
            check_gathers(messages, resolution)
            self.unsteady.update(resolution.unsteady)
            if resolution.agreed:
                self.agreed.append(messages[0].place)
            for number in resolution.going:
                self.ranks[number].done += 1


def check_gathers(messages: Sequence[Message], resolution: Resolution) -> None:
    """Who goes has what it needs, and nothing is gathered that nobody needs."""
    wanted = {
        PERSISTENT if message.point is Point.START else message.node
        for number, message in enumerate(messages)
        if number in resolution.going and message.needs
    }
    assert set(resolution.gathers) == wanted
    assert len(resolution.gathers) == len(wanted)


def forward_of(experts: Sequence[Sequence[int]]) -> list[Place]:
    places = [(Point.START, 0)]
    for block, chosen in enumerate(experts):
        places += [(Point.FORWARD, block * STRIDE + expert) for expert in chosen]
        places.append((Point.FORWARD, steady_node(block)))
    return [*places, (Point.END, 0)]


def training_of(experts: Sequence[Sequence[int]]) -> list[Place]:
    forward = forward_of(experts)
    backward = [(Point.BACKWARD, node) for point, node in reversed(forward) if point is Point.FORWARD]
    return [*forward, *backward, (Point.LAST_REDUCE, 0), (Point.STEP, 0)]


@st.composite
def models(draw: st.DrawFn) -> list[list[list[int]]]:
    """For each rank and block the experts that it runs."""
    n_blocks = draw(st.integers(1, MAX_BLOCKS))
    chosen = st.lists(st.integers(0, EXPERTS - 1), max_size=EXPERTS)
    return [[draw(chosen) for _ in range(n_blocks)] for _ in range(draw(st.integers(2, 4)))]


def virtual_ranks(ways: Sequence[Sequence[Place]], data: st.DataObject) -> list[VirtualRank]:
    """What a point like the end of a pass is, needs nothing."""
    needing = (Point.START, Point.FORWARD, Point.BACKWARD)
    return [
        VirtualRank(places, [point in needing and data.draw(st.booleans()) for point, _ in places]) for places in ways
    ]


@settings(max_examples=EXAMPLES, deadline=None)
@given(routes=models(), trains=st.booleans(), passes=st.integers(1, 2), data=st.data())
def test_ranks_with_experts_of_their_own_get_through_and_meet_in_between(
    routes: list[list[list[int]]], trains: bool, passes: int, data: st.DataObject
) -> None:
    ways = [(training_of(experts) if trains else forward_of(experts)) * passes for experts in routes]
    ranks = virtual_ranks(ways, data)
    rounds = Rounds(ranks)
    rounds.run()
    event(f"unsteady modules: {len(rounds.unsteady)}")
    assert rounds.count <= sum(len(rank.places) for rank in ranks)
    # In execution order, so nothing is unsteady but experts, and all ranks meet at each other place, in order.
    common = [place for place in ways[0] if is_common(place)]
    assert all(node % STRIDE != EXPERTS for node in rounds.unsteady)
    assert [place for place in rounds.agreed if is_common(place)] == common


def is_common(place: Place) -> bool:
    point, node = place
    return point not in (Point.FORWARD, Point.BACKWARD) or node % STRIDE == EXPERTS


@settings(max_examples=EXAMPLES, deadline=None)
@given(routes=models(), data=st.data())
def test_one_round_for_each_place_where_ranks_do_the_same(routes: list[list[list[int]]], data: st.DataObject) -> None:
    ways = [training_of(routes[0])] * len(routes)
    rounds = Rounds(virtual_ranks(ways, data))
    rounds.run()
    assert rounds.agreed == ways[0]
    assert rounds.count == len(ways[0])
    assert not rounds.unsteady


@settings(max_examples=EXAMPLES, deadline=None)
@given(routes=models(), data=st.data())
def test_experts_that_are_known_to_differ_take_as_many_rounds_as_the_busiest_rank(
    routes: list[list[list[int]]], data: st.DataObject
) -> None:
    """And no more: ranks with different experts do not wait for one another."""
    ways = [forward_of(experts) for experts in routes]
    experts = {block * STRIDE + expert for block in range(len(routes[0])) for expert in range(EXPERTS)}
    rounds = Rounds(virtual_ranks(ways, data), unsteady=set(experts))
    rounds.run()
    busiest = [max(len(rank_experts[block]) for rank_experts in routes) for block in range(len(routes[0]))]
    assert rounds.count == sum(busiest) + len(busiest) + len([Point.START, Point.END])


@settings(max_examples=EXAMPLES, deadline=None)
@given(ways=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=2, max_size=4), data=st.data())
def test_ranks_in_any_order_of_modules_still_get_through(ways: list[list[int]], data: st.DataObject) -> None:
    """They may meet nowhere but at the end: then it costs rounds, never an error."""
    places = [[(Point.START, 0), *((Point.FORWARD, node) for node in way), (Point.END, 0)] for way in ways]
    ranks = virtual_ranks(places, data)
    rounds = Rounds(ranks)
    rounds.run()
    assert rounds.agreed[-1] == (Point.END, 0)
    assert rounds.count <= sum(len(rank.places) for rank in ranks)


RUNNING = (Point.FORWARD, Point.BACKWARD)
PLACES = st.one_of(
    st.tuples(st.sampled_from([*RUNNING, Point.START]), st.integers(-3, 4)),
    st.tuples(st.sampled_from([point for point in Point if point not in RUNNING]), st.just(0)),
)
MESSAGES = st.builds(
    lambda place, needs, plan, ready, parked: Message(*place, needs, plan, ready, parked),
    PLACES,
    needs=st.booleans(),
    plan=st.integers(0, 2),
    ready=st.integers(0, 2),
    parked=st.integers(0, 1),
)
ROUNDS_OF_ANY = st.lists(MESSAGES, min_size=1, max_size=4)


@settings(max_examples=EXAMPLES, deadline=None)
@given(messages=ROUNDS_OF_ANY, unsteady=st.sets(st.integers(-3, 4)))
def test_somebody_goes_on_unless_points_exclude_each_other(messages: list[Message], unsteady: set[int]) -> None:
    resolution = resolve(messages, unsteady)
    points = {message.point for message in messages}
    can_go = (
        len(points) == 1
        or bool(points.intersection((*RUNNING, Point.END)))
        or points == {Point.REDUCE, Point.LAST_REDUCE}
    )
    assert bool(resolution.going) == can_go
    assert resolution.going <= set(range(len(messages)))
    assert resolution.agreed == (len({message.place for message in messages}) == 1)
    assert resolution.agreed or not resolution.same_plan
    assert not unsteady.intersection(resolution.unsteady)


@settings(max_examples=EXAMPLES, deadline=None)
@given(messages=ROUNDS_OF_ANY, unsteady=st.sets(st.integers(-3, 4)), data=st.data())
def test_which_rank_is_which_does_not_matter(messages: list[Message], unsteady: set[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(messages))))
    resolution = resolve(messages, unsteady)
    permuted = resolve([messages[rank] for rank in order], unsteady)
    assert {order[rank] for rank in permuted.going} == set(resolution.going)
    for name in ("gathers", "agreed", "same_plan", "unsteady", "exchange_gradients"):
        assert getattr(permuted, name) == getattr(resolution, name)


INT63 = st.integers(0, 2**63 - 1)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    message=st.builds(
        Message, st.sampled_from(Point), st.integers(-(2**62), 2**62), st.booleans(), INT63, INT63, INT63, INT63
    )
)
def test_messages_survive_the_wire(message: Message) -> None:
    wire = torch.tensor(message.encode(), dtype=torch.int64)
    decoded = Message.decode(wire.tolist())
    assert decoded == message
    assert isinstance(decoded.point, Point)
    assert isinstance(decoded.needs, bool)


GRADIENTS = st.frozensets(st.integers(0, 6))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    ranks=st.lists(
        st.tuples(st.sampled_from([Point.BACKWARD, Point.REDUCE, Point.LAST_REDUCE]), GRADIENTS, GRADIENTS),
        min_size=1,
        max_size=4,
    )
)
def test_no_gradient_is_lost_or_settled_twice(ranks: list[tuple[Point, frozenset[int], frozenset[int]]]) -> None:
    points, ready, parked = zip(*ranks)
    agreement = agree_on_gradients(points, ready, parked)
    assert agreement.reduce | agreement.park == frozenset().union(*ready, *parked)
    assert not agreement.reduce & agreement.park
    assert frozenset.intersection(*ready) | frozenset().union(*parked) <= agreement.reduce
    if set(points) == {Point.LAST_REDUCE}:
        assert not agreement.park


@settings(max_examples=EXAMPLES, deadline=None)
@given(buckets=st.lists(st.lists(GRADIENTS, max_size=4), min_size=2, max_size=4))
def test_whatever_comes_in_each_bucket_all_is_reduced_in_the_end(buckets: list[list[frozenset[int]]]) -> None:
    """Ranks with different numbers of buckets: each contribution is reduced exactly once, by a reduction of all."""
    done = [0] * len(buckets)
    parked: list[set[int]] = [set() for _ in buckets]
    ready: list[set[int]] = [set(own[0]) if own else set() for own in buckets]
    contributions = [sorted(p for bucket in own for p in bucket) for own in buckets]
    reduced: list[list[int]] = [[] for _ in buckets]
    for _ in range(sum(map(len, buckets)) + 1):
        points = [Point.REDUCE if done[r] < len(own) else Point.LAST_REDUCE for r, own in enumerate(buckets)]
        resolution = resolve([Message(point, ready=hash(frozenset(ready[r]))) for r, point in enumerate(points)], ())
        agreement = agree_on_gradients(points, ready, parked)
        for rank in range(len(buckets)):
            own = ready[rank] | parked[rank]
            # A gradient that waits already and is ready once more is added up, and reduced as one.
            reduced[rank] += [p for held in (ready[rank], parked[rank]) for p in held & agreement.reduce]
            parked[rank] = own & agreement.park
            ready[rank] = set()
        for rank in resolution.going:
            done[rank] += 1
            if done[rank] < len(buckets[rank]):
                ready[rank] = set(buckets[rank][done[rank]])
        if set(points) == {Point.LAST_REDUCE}:
            break
    assert [sorted(own) for own in reduced] == contributions
    assert not any(parked)
