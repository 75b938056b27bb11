"""What follows from the messages of a round: each rule of `resolve`, each conflict, and which gradients are reduced."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from deepspeed.runtime.zero.lockstep import (
    MESSAGE_WORDS,
    PERSISTENT,
    Message,
    ModuleNames,
    Point,
    Resolution,
    agree_on_gradients,
    as_mask,
    indices_of,
    resolve,
)

STEADY: frozenset[int] = frozenset()
EVERYONE = frozenset({0, 1})


def forward(node: int, needs: bool = True, plan: int = 0) -> Message:
    return Message(Point.FORWARD, node, needs, plan)


def backward(node: int, needs: bool = True) -> Message:
    return Message(Point.BACKWARD, node, needs)


def going(resolution: Resolution) -> set[int]:
    return set(resolution.going)


# -- all at one point --


@pytest.mark.parametrize("point", Point)
def test_ranks_at_one_point_go_on_together(point: Point) -> None:
    resolution = resolve([Message(point, 3, plan=7), Message(point, 3, plan=7)], STEADY)
    assert resolution == Resolution(going=EVERYONE, gathers=(), agreed=True, same_plan=True)


def test_one_plan_that_differs_is_no_common_plan() -> None:
    messages = [forward(3, plan=7), forward(3, plan=7), forward(3, plan=8)]
    assert resolve(messages, STEADY).agreed
    assert not resolve(messages, STEADY).same_plan


@pytest.mark.parametrize("point", [Point.FORWARD, Point.BACKWARD])
def test_a_need_of_one_rank_is_a_gather_of_all(point: Point) -> None:
    messages = [Message(point, 3), Message(point, 3, needs=True), Message(point, 3)]
    assert resolve(messages, STEADY).gathers == (3,)


def test_a_pass_begins_by_gathering_what_is_persistent() -> None:
    messages = [Message(Point.START, 5, needs=True), Message(Point.START, 5)]
    assert resolve(messages, STEADY).gathers == (PERSISTENT,)
    assert resolve(messages, STEADY).agreed


def test_a_module_that_was_apart_before_can_be_agreed_on() -> None:
    assert resolve([forward(3), forward(3)], unsteady={3}).agreed


# -- different modules --


def test_the_rank_that_is_behind_goes_first_in_a_forward() -> None:
    resolution = resolve([forward(7), forward(3), forward(7)], STEADY)
    assert resolution == Resolution(frozenset({1}), gathers=(3,), agreed=False, same_plan=False, unsteady=(3,))


def test_the_rank_that_is_behind_goes_first_in_a_backward() -> None:
    resolution = resolve([backward(7), backward(3), backward(7)], STEADY)
    assert resolution == Resolution(frozenset({0, 2}), gathers=(7,), agreed=False, same_plan=False, unsteady=(7,))


def test_a_forward_goes_before_a_backward() -> None:
    resolution = resolve([backward(1), forward(9)], STEADY)
    assert (going(resolution), resolution.gathers) == ({1}, (9,))


def test_modules_known_to_be_apart_are_served_at_once() -> None:
    resolution = resolve([forward(5), forward(3), forward(4), forward(9)], unsteady={3, 4, 5})
    assert (going(resolution), resolution.gathers) == ({0, 1, 2}, (3, 4, 5))
    assert resolution.unsteady == ()


def test_a_module_known_to_be_apart_goes_before_an_earlier_one() -> None:
    resolution = resolve([forward(2), forward(9)], unsteady={9})
    assert (going(resolution), resolution.gathers, resolution.unsteady) == ({1}, (9,), ())


def test_what_is_whole_on_all_ranks_that_go_is_not_gathered() -> None:
    resolution = resolve([forward(3, needs=False), forward(7)], STEADY)
    assert (going(resolution), resolution.gathers) == ({0}, ())


def test_a_module_in_forward_and_in_backward_is_two_places() -> None:
    resolution = resolve([forward(3), backward(3)], STEADY)
    assert not resolution.agreed
    assert going(resolution) == {0}


@pytest.mark.parametrize("point", [point for point in Point if point not in (Point.FORWARD, Point.BACKWARD)])
def test_a_rank_elsewhere_serves_those_that_run(point: Point) -> None:
    resolution = resolve([Message(point, needs=True), forward(3)], STEADY)
    assert (going(resolution), resolution.gathers) == ({1}, (3,))


# -- starts and ends --


def test_passes_of_different_kinds_begin_together() -> None:
    resolution = resolve([Message(Point.START, 0), Message(Point.START, 2, needs=True)], STEADY)
    assert resolution == Resolution(EVERYONE, gathers=(PERSISTENT,), agreed=False, same_plan=False)
    assert resolve([Message(Point.START, 0), Message(Point.START, 2)], STEADY).gathers == ()


@pytest.mark.parametrize("elsewhere", [point for point in Point if point not in (Point.FORWARD, Point.END)])
def test_the_end_of_a_forward_waits_for_no_rank_that_is_not_in_its_own(elsewhere: Point) -> None:
    """A rank that raised in its forward, say, and begins the next one while others finish theirs."""
    resolution = resolve([Message(elsewhere), Message(Point.END), Message(Point.END)], STEADY)
    also_going = {0} if elsewhere is Point.BACKWARD else set()
    assert going(resolution) == {1, 2} | also_going
    assert not resolution.agreed


def test_the_end_of_a_forward_waits_for_forwards_whoever_else_there_is() -> None:
    resolution = resolve([Message(Point.END), forward(3), Message(Point.START), backward(5)], STEADY)
    assert (going(resolution), resolution.gathers) == ({1}, (3,))


def test_a_rank_with_more_gradients_goes_on_once_the_common_ones_are_reduced() -> None:
    resolution = resolve([Message(Point.LAST_REDUCE), Message(Point.REDUCE)], STEADY)
    assert going(resolution) == {1}
    assert resolution.exchange_gradients


CONFLICTS = [
    (Point.START, Point.REDUCE),
    (Point.START, Point.LAST_REDUCE),
    (Point.START, Point.STEP),
    (Point.STEP, Point.REDUCE),
    (Point.STEP, Point.LAST_REDUCE),
    (Point.START, Point.REDUCE, Point.LAST_REDUCE),
    (Point.START, Point.STEP, Point.LAST_REDUCE),
]


@pytest.mark.parametrize("points", CONFLICTS, ids=lambda points: "-".join(point.name for point in points))
def test_ranks_that_cannot_meet_are_not_let_go(points: tuple[Point, ...]) -> None:
    for order in (points, points[::-1], (*points, points[0])):
        resolution = resolve([Message(point, needs=True) for point in order], STEADY)
        assert resolution == Resolution(frozenset(), gathers=(), agreed=False, same_plan=False)


# -- gradients --


@pytest.mark.parametrize("point", [Point.REDUCE, Point.LAST_REDUCE])
def test_gradients_are_told_apart_only_where_they_differ(point: Point) -> None:
    assert not resolve([Message(point, ready=5), Message(point, ready=5)], STEADY).exchange_gradients
    assert resolve([Message(point, ready=5), Message(point, ready=6)], STEADY).exchange_gradients


@pytest.mark.parametrize(
    ("point", "exchanges"), [(point, point in (Point.BACKWARD, Point.REDUCE, Point.LAST_REDUCE)) for point in Point]
)
def test_parked_gradients_are_settled_at_the_next_agreement_of_a_backward(point: Point, exchanges: bool) -> None:
    messages = [Message(point), Message(point, parked=1)]
    assert resolve(messages, STEADY).agreed
    assert resolve(messages, STEADY).exchange_gradients is exchanges


def test_what_all_have_ready_is_reduced_and_the_rest_waits() -> None:
    agreement = agree_on_gradients([Point.REDUCE] * 3, [{1, 2, 3}, {2, 3, 4}, {2, 3}], [(), (), ()])
    assert (agreement.reduce, agreement.park) == ({2, 3}, {1, 4})


def test_what_waited_is_reduced_at_the_next_agreement() -> None:
    agreement = agree_on_gradients([Point.BACKWARD] * 2, [(), ()], [{1}, {4}])
    assert (agreement.reduce, agreement.park) == ({1, 4}, set())


def test_at_the_end_of_the_backward_all_is_reduced() -> None:
    agreement = agree_on_gradients([Point.LAST_REDUCE] * 2, [{1, 2}, {2, 3}], [(), {7}])
    assert (agreement.reduce, agreement.park) == ({1, 2, 3, 7}, set())


def test_a_rank_that_is_at_the_end_waits_for_one_that_is_not() -> None:
    agreement = agree_on_gradients([Point.LAST_REDUCE, Point.REDUCE], [{1, 2}, {2}], [(), ()])
    assert (agreement.reduce, agreement.park) == ({2}, {1})


def test_a_rank_with_nothing_ready_makes_all_others_wait() -> None:
    agreement = agree_on_gradients([Point.REDUCE, Point.LAST_REDUCE], [{1}, ()], [(), ()])
    assert (agreement.reduce, agreement.park) == (set(), {1})


# -- words --


def test_a_message_has_a_word_for_each_field() -> None:
    message = Message(Point.LAST_REDUCE, -5, True, 2**63 - 1, 2**63 - 1, 3, 4)
    assert len(message.encode()) == MESSAGE_WORDS
    assert torch.tensor(message.encode(), dtype=torch.int64).tolist() == message.encode()
    assert Message.decode(message.encode()) == message


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Message)])
def test_no_field_is_lost_on_the_way(field: str) -> None:
    message = dataclasses.replace(Message(Point.FORWARD), **{field: Point.END if field == "point" else 1})
    assert Message.decode(message.encode()) == message != Message(Point.FORWARD)


def test_a_place_is_described_by_module_parameters_and_pass() -> None:
    names = ModuleNames({3: "layers.0.mlp", 4: "act"}, {3: ("weight_in", "weight_out")})
    text = names.describe(Message(Point.FORWARD, 3, pass_number=12))
    assert all(word in text for word in ("forward", "layers.0.mlp", "weight_in", "weight_out", "pass 12"))
    assert "backward of act" in names.describe(Message(Point.BACKWARD, 4))
    assert "9" in names.describe(Message(Point.BACKWARD, 9)), "a module without a name is still told"
    outside = [names.describe(Message(point, 3)) for point in Point if point not in (Point.FORWARD, Point.BACKWARD)]
    assert len(set(outside)) == len(Point) - 2
    assert not any("layers.0.mlp" in text for text in outside), "where a rank is in no module, none is named"


@pytest.mark.parametrize("indices", [[], [0], [4], [0, 2, 4], [0, 1, 2, 3, 4]])
def test_masks_hold_their_indices(indices: list[int]) -> None:
    mask = as_mask(indices[::-1], 5)
    assert (mask.dtype, mask.shape) == (torch.uint8, (5,))
    assert indices_of(mask) == indices
