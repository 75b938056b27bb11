"""Memory that ranks share: who may die when, what is left then, and where there is no room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.lockstep import Peers
from deepspeed.runtime.zero.node_segment import (
    NAME_PREFIX,
    Counter,
    Named,
    Nameless,
    NodeSegment,
    SegmentUnavailable,
    remove_leftovers,
    share,
)
from torch import distributed

from tests.harness import distributed as on_ranks

PATIENT_S = 20.0
N_BYTES = 10_000
PLACES = pytest.mark.parametrize("named", [False, True], ids=["nameless", "named"])


class Unopenable(Nameless):
    """As where /proc is hidden, or the ranks are in containers of their own."""

    def make(self, n_bytes: int) -> int:
        descriptor = super().make(n_bytes)
        self.address = "/proc/0/fd/0"
        return descriptor


def segment_of(peers: Peers, *places: Nameless | Named) -> NodeSegment:
    return share(N_BYTES, peers.rank, len(peers.ranks), peers.exchange_objects, places or None)


def leftovers_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(NAME_PREFIX)]


@PLACES
@on_ranks(world_size=(2, 3))
def test_what_one_rank_writes_all_read(rank: int, world_size: int, named: bool, shared_dir: Path) -> None:
    peers = Peers(None, PATIENT_S)
    segment = segment_of(peers, *([Named(shared_dir)] if named else []))
    distributed.barrier()
    assert not leftovers_in(shared_dir)
    assert not leftovers_in(Path("/dev/shm"))
    assert segment.memory.shape == (N_BYTES,)
    assert not segment.memory.any()
    distributed.barrier()
    segment.memory[rank::world_size] = rank + 1
    for _ in range(rank):
        segment.count(Counter.PROGRESS)
    distributed.barrier()
    for other in range(world_size):
        assert bool((segment.memory[other::world_size] == other + 1).all())
        assert segment.counted(other, Counter.PROGRESS) == other
        assert segment.is_alive(other)
    distributed.barrier()
    segment.close()
    distributed.barrier()
    assert segment.memory[1] == 2, "what is mapped stays"
    peers.close()


@on_ranks(world_size=2)
def test_a_place_that_not_all_can_open_is_left_for_the_next(rank: int, shared_dir: Path) -> None:
    peers = Peers(None, PATIENT_S)
    segment = segment_of(peers, Unopenable(), Named(shared_dir / "missing"), Named(shared_dir))
    segment.memory[rank] = 7
    distributed.barrier()
    assert segment.memory[:3].tolist() == [7, 7, 0]
    assert not leftovers_in(shared_dir)
    distributed.barrier()


@on_ranks(world_size=2)
def test_without_any_place_all_ranks_are_told_why(rank: int, shared_dir: Path) -> None:
    peers = Peers(None, PATIENT_S)
    with pytest.raises(SegmentUnavailable, match=r"10,000 bytes.*rank 1: .*/proc/0/fd/0.*; rank 0: .*missing"):
        segment_of(peers, Unopenable(), Named(shared_dir / "missing"))
    distributed.barrier()


@on_ranks(world_size=2)
def test_too_small_a_file_system_says_what_is_needed(rank: int, shared_dir: Path) -> None:
    peers = Peers(None, PATIENT_S)
    too_much = 2**60
    with pytest.raises(SegmentUnavailable, match=r"1,152,921,504,606,8\d\d,\d\d\d bytes are needed, [\d,]+ are free"):
        share(too_much, rank, 2, peers.exchange_objects, [Named(shared_dir)])
    assert not leftovers_in(shared_dir)
    distributed.barrier()


@on_ranks(world_size=3, mortal_ranks=(1,))
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_is_known_to_be_dead_and_its_bytes_stay(rank: int, how: signal.Signals) -> None:
    peers = Peers(None, PATIENT_S)
    segment = segment_of(peers)
    segment.memory[rank] = rank + 1
    peers.exchange_objects(None)
    if rank == 1:
        signal.signal(how, signal.SIG_DFL) if how is signal.SIGTERM else None
        os.kill(os.getpid(), how)
    while segment.is_alive(1):
        pass
    assert segment.is_alive(2 - rank)
    assert segment.memory[:3].tolist() == [1, 2, 3]


def test_a_file_whose_maker_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from deepspeed.runtime.zero.node_segment import Named;"
        "Named(Path(sys.argv[1])).make(5000); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(leftovers_in(tmp_path)) == 1
    living = Named(tmp_path)
    descriptor = living.make(5000)
    assert leftovers_in(tmp_path) == [Path(living.address).name]
    remove_leftovers(tmp_path)
    assert leftovers_in(tmp_path) == [Path(living.address).name], "its maker lives"
    os.close(descriptor)


def test_another_file_of_the_same_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """In another container the address may lead to a segment of somebody else."""
    other = Named(tmp_path)
    os.close(other.make(N_BYTES + 8192))
    offers = [(other.address, b"another token!!!")]

    def exchange(mine: object) -> list[object]:
        """Rank 0 offers the file, and then has no problem with it."""
        return [offers.pop() if offers else "", mine]

    with pytest.raises(SegmentUnavailable, match="is another file there"):
        share(N_BYTES, 1, 2, exchange, [Nameless()])


def test_memory_outlives_the_segment() -> None:
    segment = share(N_BYTES, 0, 1, lambda mine: [mine])
    memory = segment.memory
    segment.close()
    segment.close()
    del segment
    memory.fill_(3)
    assert int(memory.to(torch.int64).sum()) == 3 * N_BYTES
