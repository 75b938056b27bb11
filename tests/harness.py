"""Writing tests that run on several ranks. The only module of the harness that a test file needs.

::

    @distributed(world_size=(1, 2), timeout_s=30)
    @pytest.mark.parametrize("offload", ["none", "cpu"])
    def test_forward_equals_plain_torch(offload: str, shared_dir: Path) -> None:
        ...  # runs on every rank; the default process group and DeepSpeed's backend are there

``docs/testing.md`` tells the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from tests.rank_failures import DistributedFailure, PoolBroken, RankDied, RankRaised, RankReport, RankTimeout
from tests.rank_pool import DEFAULT_TIMEOUT_S, PoolReplaced, RankExit, RankPool, RankPools

__all__ = [
    "DistributedFailure",
    "DistributedTest",
    "KnownFault",
    "PoolBroken",
    "PoolReplaced",
    "RankDied",
    "RankExit",
    "RankPool",
    "RankPools",
    "RankRaised",
    "RankReport",
    "RankTimeout",
    "Symptom",
    "distributed",
    "known_fault",
]

MAX_WORLD_SIZE = 4
_Test = TypeVar("_Test", bound=Callable[..., object])


@dataclass(frozen=True)
class DistributedTest:
    """On how many ranks a test runs, and how long it may take there."""

    world_sizes: tuple[int, ...]
    timeout_s: float
    mortal_ranks: frozenset[int]

    def __post_init__(self) -> None:
        wrong = [size for size in self.world_sizes if not 1 <= size <= MAX_WORLD_SIZE]
        if wrong or not self.world_sizes:
            raise ValueError(f"world_size: expected numbers from 1 to {MAX_WORLD_SIZE}, got {self.world_sizes}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s: expected a positive number of seconds, got {self.timeout_s}")
        if self.mortal_ranks and max(self.mortal_ranks) >= min(self.world_sizes):
            raise ValueError(f"mortal_ranks {sorted(self.mortal_ranks)} are not all ranks of {min(self.world_sizes)}")


def distributed(
    world_size: int | Iterable[int] = (1, 2), timeout_s: float = DEFAULT_TIMEOUT_S, mortal_ranks: Iterable[int] = ()
) -> pytest.MarkDecorator:
    """Run the test on every rank of a pool, once for each world size.

    ``timeout_s`` counts from when all ranks stand ready. ``mortal_ranks`` may end their process without failing the
    test.
    """
    sizes = (world_size,) if isinstance(world_size, int) else tuple(world_size)
    return pytest.mark.distributed(DistributedTest(sizes, timeout_s, frozenset(mortal_ranks)))


class KnownFault(Exception):
    """A test failed in exactly the way that is on record for it."""


@dataclass(frozen=True)
class Symptom:
    """How a fault shows: the exception's type, and a pattern that its full text (all ranks, stacks, output) must
    contain."""

    raises: type[BaseException]
    match: str

    def shown_by(self, error: BaseException) -> bool:
        return isinstance(error, self.raises) and re.search(self.match, str(error)) is not None


def known_fault(reason: str, *symptoms: Symptom) -> Callable[[_Test], _Test]:
    """Expect the test to fail with one of the symptoms until the fault is mended.

    Passing fails the suite (strict), and so does failing in any other way: remove the decorator when the fault is gone.
    """
    if not symptoms:
        raise ValueError("known_fault: expected at least one Symptom, so that a different failure is noticed")

    def decorate(test: _Test) -> _Test:
        marked = pytest.mark.known_fault(symptoms)(test)
        return pytest.mark.xfail(strict=True, raises=KnownFault, reason=reason)(marked)

    return decorate
