"""The control group on real gloo: rounds, ranks that do not come, and going on afterwards."""

from __future__ import annotations

import time

import pytest
import torch
from deepspeed.runtime.zero.lockstep import (
    GRACE_S,
    LockstepError,
    Message,
    ModuleNames,
    Peers,
    Point,
    as_mask,
    indices_of,
)
from torch import distributed

from tests.harness import distributed as on_ranks

NAMES = ModuleNames({0: "embed", 1: "layers.0", 2: "layers.1"}, {1: ("layers.0.weight",), 2: ("layers.1.weight",)})
PATIENT_S = 20.0
"""Never reached."""
TIMEOUT_S = 1.0
LATE_S = 5.0
"""How much later than its limits a busy machine may say so."""


def meet(peers: Peers, round_number: int) -> None:
    """A round in which every rank tells something else."""
    expected = [
        Message(Point.FORWARD, rank, rank % 2 == 0, 2**63 - 1 - rank, rank, 0, round_number)
        for rank in range(len(peers.ranks))
    ]
    assert peers.exchange(expected[peers.rank], NAMES) == expected


def all_are_here() -> None:
    """A barrier on the default group: it needs nothing of the control group."""
    distributed.barrier()


@on_ranks(world_size=(2, 3))
def test_each_rank_sees_all_messages_in_rank_order(rank: int, world_size: int) -> None:
    peers = Peers(None, PATIENT_S)
    assert (peers.ranks, peers.rank) == (list(range(world_size)), rank)
    for round_number in range(20):
        meet(peers, round_number)
    assert peers.rounds == 20
    peers.close()


@on_ranks(world_size=(2, 3))
def test_each_rank_sees_all_masks(rank: int, world_size: int) -> None:
    peers = Peers(None, PATIENT_S)
    everyones = peers.exchange_masks(as_mask([rank, 5], 7), Message(Point.REDUCE), NAMES)
    assert everyones.shape == (world_size, 7)
    assert [indices_of(row) for row in everyones] == [[other, 5] for other in range(world_size)]
    assert peers.rounds == 0, "masks belong to a round"
    peers.close()


@on_ranks(world_size=3)
def test_a_part_of_the_ranks_counts_in_its_own_order(rank: int) -> None:
    group = distributed.new_group([0, 2])
    if rank != 1:
        peers = Peers(group, PATIENT_S)
        assert (peers.ranks, peers.rank) == ([0, 2], rank // 2)
        meet(peers, 1)
        error = peers.apart([Message(Point.STEP), Message(Point.FORWARD, 1)], NAMES)
        assert "rank 2 waits at the forward of layers.0" in str(error), "ranks are named as the world counts them"
        assert "rank 1" not in str(error)
        peers.close()
    all_are_here()


@on_ranks(world_size=2)
def test_two_control_groups_do_not_mix(rank: int) -> None:
    first, second = Peers(None, PATIENT_S), Peers(None, PATIENT_S)
    for peers, point in ((first, Point.STEP), (second, Point.END), (first, Point.START)):
        messages = peers.exchange(Message(point, rank), NAMES)
        assert messages == [Message(point, 0), Message(point, 1)]
    first.close()
    meet(second, 1)
    second.close()


@on_ranks(world_size=(2, 3))
def test_ranks_that_wait_are_told_who_did_not_come_and_where_it_was(rank: int, world_size: int) -> None:
    peers = Peers(None, TIMEOUT_S)
    last = world_size - 1
    peers.exchange(Message(Point.FORWARD, rank % 3, pass_number=4), NAMES)
    all_are_here()
    if rank != last:
        began_s = time.monotonic()
        with pytest.raises(LockstepError) as raised:
            peers.exchange(Message(Point.BACKWARD, 1, pass_number=4), NAMES)
        took_s = time.monotonic() - began_s
        assert TIMEOUT_S * 0.9 <= took_s <= TIMEOUT_S + GRACE_S + LATE_S
        text = str(raised.value)
        assert f"rank {rank} (this one) waits at the backward of layers.0" in text
        assert "layers.0.weight" in text
        assert f"rank {last} did not come" in text
        assert f"it last was at the forward of {NAMES.modules[last % 3]}" in text
        assert "pass 4" in text
        assert f"stage3_lockstep_timeout_s (now {TIMEOUT_S:g})" in text
        for other in set(range(last)) - {rank}:
            assert f"rank {other} waits at the backward of layers.0" in text
        assert isinstance(raised.value.__cause__, RuntimeError)
    all_are_here()
    peers.close()


@on_ranks(world_size=2)
def test_a_rank_that_comes_too_late_is_told_where_the_other_gave_up(rank: int) -> None:
    peers = Peers(None, TIMEOUT_S)
    if rank == 0:
        with pytest.raises(LockstepError):
            peers.exchange(Message(Point.FORWARD, 2), NAMES)
    # Only now does rank 1 come: rank 0 has left, and its connection with it.
    all_are_here()
    if rank == 1:
        with pytest.raises(LockstepError) as raised:
            peers.exchange(Message(Point.STEP), NAMES)
        assert "rank 0 waits at the forward of layers.1" in str(raised.value)
        assert "rank 1 (this one) waits at engine.step()" in str(raised.value)
    all_are_here()
    peers.close()


@on_ranks(world_size=(2, 3))
def test_rounds_go_on_after_every_rank_has_seen_the_failure(rank: int, world_size: int) -> None:
    peers = Peers(None, TIMEOUT_S)
    meet(peers, 0)
    late = world_size - 1
    for _ in range(2):
        if rank != late:
            with pytest.raises(LockstepError):
                peers.exchange(Message(Point.FORWARD, 1), NAMES)
        all_are_here()
        if rank == late:
            with pytest.raises(LockstepError):
                peers.exchange(Message(Point.FORWARD, 2), NAMES)
        all_are_here()
        meet(peers, 1)
        masks = peers.exchange_masks(torch.full((3,), rank, dtype=torch.uint8), Message(Point.REDUCE), NAMES)
        assert masks[:, 0].tolist() == list(range(world_size))
    assert peers.rounds == 3, "a round that failed is none"
    peers.close()


@on_ranks(world_size=2)
def test_what_a_failure_told_is_not_told_again_of_the_next_one(rank: int) -> None:
    peers = Peers(None, TIMEOUT_S)
    for late, node in ((1, 1), (0, 2)):
        if rank != late:
            with pytest.raises(LockstepError) as raised:
                peers.exchange(Message(Point.FORWARD, node), NAMES)
            assert f"rank {late} did not come" in str(raised.value)
        all_are_here()
        if rank == late:
            with pytest.raises(LockstepError) as raised:
                peers.exchange(Message(Point.STEP), NAMES)
            assert f"rank {1 - late} waits at the forward of {NAMES.modules[node]}" in str(raised.value)
        all_are_here()
        meet(peers, 1)
    peers.close()


@on_ranks(world_size=2)
def test_ranks_that_came_to_different_places_are_all_named(rank: int) -> None:
    peers = Peers(None, PATIENT_S)
    messages = peers.exchange(Message(Point.STEP if rank else Point.START, pass_number=3 + rank), NAMES)
    text = str(peers.apart(messages, NAMES))
    assert "rank 0 waits at the start of a forward pass, pass 3" in text
    assert "rank 1 waits at engine.step(), pass 4" in text
    # That is no failure of the group.
    meet(peers, 1)
    peers.close()


@on_ranks(world_size=2)
def test_closing_twice_is_closing(rank: int) -> None:
    peers = Peers(None, PATIENT_S)
    meet(peers, 0)
    peers.close()
    peers.close()
    meet(Peers(None, PATIENT_S), 1)
