"""All-gathers rank by rank on real gloo."""

from __future__ import annotations

import datetime
import uuid

import pytest
import torch
from deepspeed.runtime.zero import pairwise
from deepspeed.runtime.zero.pairwise import Channel
from torch import distributed

from tests.harness import distributed as on_ranks

PATIENT = datetime.timedelta(seconds=20)
SHORT = datetime.timedelta(seconds=1)


def connect(rank: int, world_size: int) -> distributed.ProcessGroupGloo:
    name = [uuid.uuid4().hex]
    distributed.broadcast_object_list(name)
    store = distributed.PrefixStore(name[0], distributed.distributed_c10d._get_default_store())
    return distributed.ProcessGroupGloo(store, rank, world_size, PATIENT)


def rows(rank: int, world_size: int, n_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank starts with, and what every rank ends with."""
    everyones = torch.arange(world_size * n_bytes, dtype=torch.int64).to(torch.uint8).view(world_size, n_bytes)
    mine = torch.zeros_like(everyones)
    mine[rank] = everyones[rank]
    return mine, everyones


@on_ranks(world_size=(2, 3))
def test_every_rank_gets_every_row(rank: int, world_size: int) -> None:
    group = connect(rank, world_size)
    for n_bytes in (1, 16, 1000, 3_000_001):
        received, everyones = rows(rank, world_size, n_bytes)
        pairwise.all_gather_into_tensor(received, received[rank], group).wait(PATIENT)
        torch.testing.assert_close(received, everyones, rtol=0, atol=0)


@on_ranks(world_size=2)
def test_gathers_of_one_size_stay_in_order_and_channels_do_not_mix(rank: int, world_size: int) -> None:
    group = connect(rank, world_size)
    control, payload, later = (torch.full((2, 8), float(value)) for value in (1 + rank, 10 + rank, 20 + rank))
    started = [
        (pairwise.start(received, group, channel), received)
        for received, channel in (
            [(payload, Channel.PARAMETERS), (control, Channel.CONTROL), (later, Channel.PARAMETERS)]
            if rank
            else [(control, Channel.CONTROL), (payload, Channel.PARAMETERS), (later, Channel.PARAMETERS)]
        )
    ]
    for gather, _ in reversed(started):
        gather.wait(PATIENT)
    for received, first in ((control, 1.0), (payload, 10.0), (later, 20.0)):
        assert received[:, 0].tolist() == [first, first + 1]


@on_ranks(world_size=2)
def test_different_sizes_end_in_an_exception(rank: int, world_size: int) -> None:
    group = connect(rank, world_size)
    gather = pairwise.start(torch.zeros(2, 8 + rank), group, Channel.PARAMETERS)
    with pytest.raises(RuntimeError):
        gather.wait(SHORT)
    distributed.barrier()


@on_ranks(world_size=3)
def test_a_rank_that_does_not_come_ends_in_an_exception(rank: int, world_size: int) -> None:
    group = connect(rank, world_size)
    if rank:
        gather = pairwise.start(torch.zeros(3, 8), group, Channel.CONTROL)
        with pytest.raises(RuntimeError):
            gather.wait(SHORT)
    distributed.barrier()
