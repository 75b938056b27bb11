"""Host memory in front of the disk: what stays there is what will be needed soonest.

A cache that keeps what was used last never hits in a loop over layers, since it drops each layer just before its turn
comes. The runtime knows what comes next, so this one keeps the partitions whose next use is nearest (Belady, "A study
of replacement algorithms for a virtual-storage computer", 1966). Where nothing is known of the next use, it keeps what
it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Optional

import torch

NextUse = Callable[[int], Optional[int]]
"""From the number of a partition to how many steps away its next use is; None if that is not known."""


@dataclass
class HostCache:
    """Partitions in host memory, by number.

    Args:
        limit_numel: how many elements it may hold (``max_in_cpu``). 0 turns it off.
        next_use: tells when a partition is needed again.
    """

    limit_numel: int
    next_use: NextUse = lambda number: None
    hits: int = 0
    misses: int = 0
    _entries: dict[int, torch.Tensor] = field(default_factory=dict)
    _numel: int = 0

    @property
    def numel(self) -> int:
        """Elements that it holds."""
        return self._numel

    def get(self, number: int) -> Optional[torch.Tensor]:
        """The partition, ``(numel,)``, not to be changed; None if it is not here. Counts hits and misses."""
        entry = self._entries.get(number)
        if entry is None:
            self.misses += 1
        else:
            self.hits += 1
        return entry

    def wants(self, number: int, numel: int) -> bool:
        """Whether `offer` would keep a partition of ``numel`` elements that is not here."""
        return self._victims(number, numel) is not None

    def offer(self, number: int, data: torch.Tensor) -> bool:
        """Keep ``data``, which nobody will change, if it will be needed before what would have to go for it."""
        self.drop(number)
        victims = self._victims(number, data.numel())
        if victims is None:
            return False
        for victim in victims:
            self.drop(victim)
        self._entries[number] = data
        self._numel += data.numel()
        return True

    def drop(self, number: int) -> None:
        """Forget a partition: there is a newer one, or nobody needs it."""
        entry = self._entries.pop(number, None)
        if entry is not None:
            self._numel -= entry.numel()

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self._numel = 0

    def _distance(self, number: int) -> float:
        steps = self.next_use(number)
        return float("inf") if steps is None else steps

    def _victims(self, number: int, numel: int) -> Optional[list[int]]:
        """What has to go for a partition; None if that is not worth it, or not enough."""
        victims: list[int] = []
        missing_numel = self._numel + numel - self.limit_numel
        if missing_numel <= 0:
            return victims
        distance = self._distance(number)
        for victim in sorted(self._entries, key=self._distance, reverse=True):
            if missing_numel <= 0 or self._distance(victim) <= distance:
                break
            victims.append(victim)
            missing_numel -= self._entries[victim].numel()
        return victims if missing_numel <= 0 else None
