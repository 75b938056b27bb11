"""The host cache under any sequence of uses: within its limit, never stale, and as good as can be in a loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from deepspeed.runtime.swap_tensor.host_cache import HostCache
from hypothesis import given
from hypothesis import strategies as st


class Loop:
    """Goes through a sequence of partitions again and again."""

    def __init__(self, sequence: Sequence[int], cache: HostCache, numel: Sequence[int]) -> None:
        self.sequence = sequence
        self.cache = cache
        self.numel = numel
        self.position = 0
        cache.next_use = self.steps_to

    def steps_to(self, number: int) -> int | None:
        length = len(self.sequence)
        for steps in range(1, length + 1):
            if self.sequence[(self.position + steps) % length] == number:
                return steps
        return None

    def turn(self) -> None:
        """Use each partition once in its turn: from the cache, or from the disk and then offered to the cache."""
        for position, number in enumerate(self.sequence):
            self.position = position
            found = self.cache.get(number)
            if found is None:
                found = torch.full((self.numel[number],), float(number))
                wanted = self.cache.wants(number, self.numel[number])
                assert self.cache.offer(number, found) is wanted
            assert found.tolist() == [float(number)] * self.numel[number]
            assert self.cache.numel <= self.cache.limit_numel


@given(
    layers=st.integers(1, 12),
    limit=st.integers(0, 14),
    there_and_back=st.booleans(),
)
def test_share_of_hits_in_a_loop_is_the_share_that_fits(layers: int, limit: int, there_and_back: bool) -> None:
    forward = list(range(layers))
    sequence = forward + forward[::-1] if there_and_back else forward
    cache = HostCache(limit)
    loop = Loop(sequence, cache, [1] * layers)
    loop.turn()
    cache.hits = cache.misses = 0
    for _ in range(3):
        loop.turn()
    fitting = min(limit, layers)
    # The best that any cache can do leaves out one place for what passes through.
    best_misses = 0 if fitting == layers else layers - fitting
    assert cache.misses <= 3 * best_misses * (2 if there_and_back else 1)
    assert cache.hits + cache.misses == 3 * len(sequence)


@given(
    numel=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    limit=st.integers(0, 30),
    uses=st.lists(st.integers(0, 7), min_size=1, max_size=30),
)
def test_never_over_its_limit_whatever_is_offered(numel: list[int], limit: int, uses: list[int]) -> None:
    sequence = [use % len(numel) for use in uses]
    loop = Loop(sequence, HostCache(limit), numel)
    for _ in range(3):
        loop.turn()


def test_off_keeps_nothing() -> None:
    cache = HostCache(0)
    assert not cache.offer(0, torch.ones(1))
    assert cache.get(0) is None


def test_newer_data_takes_the_place_of_older() -> None:
    cache = HostCache(4)
    assert cache.offer(0, torch.zeros(4))
    assert cache.offer(0, torch.ones(4))
    entry = cache.get(0)
    assert entry is not None
    assert entry.tolist() == [1.0] * 4
    cache.drop(0)
    assert cache.numel == 0
    assert cache.get(0) is None
    assert (cache.hits, cache.misses) == (1, 1)


@pytest.mark.parametrize("known", [True, False])
def test_without_knowledge_it_keeps_what_it_has(known: bool) -> None:
    cache = HostCache(1, next_use=(lambda number: 10 - number) if known else (lambda number: None))
    assert cache.offer(0, torch.ones(1))
    assert cache.offer(1, torch.ones(1)) is known
