"""What to gather, prefetch and release at each step that the trace expects. Pure: no torch, no effects.

A `Segment` is planned once and carried out many times. It names every collective that following it takes, in order, so
two ranks whose segments have one fingerprint and that both follow it gather the same parameters at the same time.

Parameters are indices, sizes are elements of the whole parameter (`_numel`). Persistent parameters are always whole and
never appear.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional

from deepspeed.runtime.zero.trace import Event, Step


@dataclass(frozen=True)
class Budgets:
    """Limits, in elements; a ds_config's names are in parentheses."""

    prefetch_numel: int
    """What one prefetch may gather (``stage3_prefetch_bucket_size``). 0 turns prefetching off."""
    live_numel: int
    """What may be whole or in flight at one time (``stage3_max_live_parameters``)."""
    reuse_numel: int
    """A parameter that is used again after fewer elements than this stays whole (``stage3_max_reuse_distance``)."""


@dataclass(frozen=True)
class Need:
    """What a module needs to be whole while it runs."""

    params: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Gather:
    """One collective. ``fingerprint`` travels with its payload and proves that all ranks gather the same."""

    params: tuple[int, ...]
    fingerprint: int


@dataclass(frozen=True)
class Decision:
    """What to do at one step, in this order: release, wait, fetch, prefetch."""

    step: Step
    release: tuple[int, ...] = ()
    """Not used for long enough, or in the way of what is needed now."""
    wait: bool = False
    """The prefetch in flight has to be whole for this step."""
    fetch: Optional[Gather] = None
    """Needed now, and neither whole nor in flight."""
    prefetch: Optional[Gather] = None

    @cached_property
    def gathers(self) -> bool:
        """Whether there is anything to do but release."""
        return self.wait or self.fetch is not None or self.prefetch is not None


@dataclass(frozen=True)
class Segment:
    """Decisions for a stretch of a path. ``decisions[0]`` is for the step that has just been agreed on."""

    decisions: tuple[Decision, ...]
    fingerprint: int
    complete: bool = True
    """It goes to the end of the path; if not, ranks have to agree anew where it ends."""
    over_budget: tuple[tuple[int, int], ...] = ()
    """Steps, as (node, elements live), at which a module and those around it need more than may be live."""


_OF_MODULES = (Event.ENTER, Event.LEAVE, Event.BACKWARD)

EMPTY_SEGMENT = Segment((), 0, complete=False)
"""Nothing can be foreseen."""


def fingerprint_of(numbers: Iterable[int]) -> int:
    """63 bits that differ for different sequences, the same in every process."""
    digest = hashlib.blake2b(array("q", numbers).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Planner:
    """Plans for one model.

    Args:
        needs: for each node that fetches, what it needs.
        numel: elements of each parameter.
        ancestors: for each node, the nodes whose modules contain its module.
        owners: for a node that stands for one more parameter of a module, that module's node.
    """

    budgets: Budgets
    needs: Mapping[int, Need]
    numel: Sequence[int]
    ancestors: Mapping[int, frozenset[int]] = field(default_factory=dict)
    owners: Mapping[int, int] = field(default_factory=dict)

    def plan(
        self,
        steps: Sequence[Step],
        unsteady: Collection[int] = (),
        held: Iterable[int] = (),
        idle: Iterable[int] = (),
        ahead: Iterable[int] = (),
        in_backward: Iterable[int] = (),
    ) -> Segment:
        """Plan for ``steps``, whose first one has just been taken and has what it needs.

        The segment ends before the first step of an ``unsteady`` node: ranks differ there. ``held`` is what modules
        that are running around the first step hold, ``idle`` what is whole besides, and ``ahead`` what of that was
        fetched ahead and not used so far. ``in_backward`` are the nodes whose backward has begun, first to last; what
        they need is held.
        """
        stretch = []
        for step in steps:
            if stretch and step.node in unsteady and step.event in _OF_MODULES:
                break
            stretch.append(step)
        if len(stretch) < 2:
            return EMPTY_SEGMENT
        return _Rehearsal(self, stretch, held, idle, ahead, in_backward).segment(complete=len(stretch) == len(steps))


class _Rehearsal:
    """Goes through a segment once, keeping count of what would be whole."""

    def __init__(
        self,
        planner: Planner,
        steps: Sequence[Step],
        held: Iterable[int],
        idle: Iterable[int],
        ahead: Iterable[int],
        in_backward: Iterable[int],
    ) -> None:
        self._planner = planner
        self._budgets = planner.budgets
        self._steps = steps
        self._uses, self._traversed = self._index_uses()
        self._holds: Counter[int] = Counter(held)
        self._live: dict[int, None] = dict.fromkeys(sorted({*self._holds, *idle}))
        self._live_numel = sum(planner.numel[p] for p in self._live)
        self._ahead = set(ahead)
        """Whole or in flight, fetched ahead, and not used so far."""
        self._in_flight: tuple[int, ...] = ()
        self._scanned_to = 1
        """All that steps before this one need is whole or in flight."""
        self._backward_uses = list(in_backward)
        self._over_budget: dict[int, int] = {}

    def segment(self, complete: bool) -> Segment:
        decisions = [self._decide(position, step) for position, step in enumerate(self._steps)]
        fingerprint = fingerprint_of([_fingerprint(decisions), complete])
        return Segment(tuple(decisions), fingerprint, complete, tuple(self._over_budget.items()))

    def _need(self, step: Step) -> tuple[int, ...]:
        return self._need_of(step.node) if step.event in (Event.ENTER, Event.BACKWARD) else ()

    def _need_of(self, node: int) -> tuple[int, ...]:
        need = self._planner.needs.get(node)
        return need.params if need is not None else ()

    def _index_uses(self) -> tuple[dict[int, list[int]], list[int]]:
        """For each parameter where it is needed; and the elements needed by all steps before each position."""
        uses: dict[int, list[int]] = {}
        traversed = [0]
        for position, step in enumerate(self._steps):
            need = self._need(step)
            for param in need:
                uses.setdefault(param, []).append(position)
            traversed.append(traversed[-1] + sum(self._planner.numel[p] for p in need))
        return uses, traversed

    def _next_use(self, param: int, position: int) -> Optional[int]:
        uses = self._uses.get(param, ())
        found = bisect_right(uses, position)
        return uses[found] if found < len(uses) else None

    def _decide(self, position: int, step: Step) -> Decision:
        released = self._end_uses(position, step)
        need = self._need(step)
        wait = False
        fetch: tuple[int, ...] = ()
        evicted: tuple[int, ...] = ()
        if position == 0:
            # Agreed on already: whoever took this step has what it needs. What else is whole may have lost its use.
            self._add([p for p in need if p not in self._live])
            unwanted = [p for p in self._live if p not in need and self._holds[p] <= 0]
            unwanted = [p for p in unwanted if not self._worth_keeping(p, position + 1)]
            self._drop(unwanted, position)
            released = tuple(sorted({*released, *unwanted}))
        else:
            missing = [p for p in need if p not in self._live]
            wait = any(p in self._in_flight for p in need) or (bool(missing) and bool(self._in_flight))
            if wait:
                self._in_flight = ()
            fetch = tuple(sorted(missing))
            evicted = self._make_room(position, need, sum(self._planner.numel[p] for p in fetch), step.node)
            self._add(fetch)
        self._holds.update(need)
        self._ahead.difference_update(need)
        if step.event is Event.BACKWARD:
            self._backward_uses.append(step.node)
        self._scanned_to = max(self._scanned_to, position + 1)
        prefetch = () if self._in_flight else self._choose_prefetch(position)
        return Decision(
            step=step,
            release=tuple(sorted({*released, *evicted})),
            wait=wait,
            fetch=_gather(fetch),
            prefetch=_gather(prefetch),
        )

    def _add(self, params: Iterable[int]) -> None:
        for param in params:
            self._live[param] = None
            self._live_numel += self._planner.numel[param]

    def _drop(self, params: Iterable[int], position: int) -> None:
        for param in params:
            del self._live[param]
            self._ahead.discard(param)
            self._live_numel -= self._planner.numel[param]
            again = self._next_use(param, position)
            if again is not None:
                self._scanned_to = min(self._scanned_to, again)

    def _end_uses(self, position: int, step: Step) -> tuple[int, ...]:
        """Uses that are over once ``step`` is taken; what they release."""
        ended: list[int] = []
        if step.event is Event.LEAVE:
            ended.extend(self._need_of(step.node))
        elif step.event is Event.BACKWARD:
            # Backward goes strictly from the last operation to the first: a use is over once the backward of
            # something begins that is neither around it nor in it. What is in a module may come before it, but what
            # is there when its next call comes was in the one before.
            again = step.node in self._backward_uses
            over = [
                use
                for use in self._backward_uses
                if not self._is_around(use, step.node) and (again or not self._may_be_in(use, step.node))
            ]
            self._backward_uses = [use for use in self._backward_uses if use not in over]
            for use in reversed(over):
                ended.extend(self._need_of(use))
        elif step.event is Event.BACKWARD_END:
            self._backward_uses.clear()
            self._holds.clear()
        for param in ended:
            self._holds[param] -= 1
        if step.event is Event.BACKWARD_END:
            released = list(self._live)
        else:
            free = dict.fromkeys(p for p in ended if p in self._live and self._holds[p] <= 0)
            released = [p for p in free if not self._worth_keeping(p, position)]
        self._drop(released, position - 1)
        return tuple(sorted(released))

    def _is_around(self, one: int, other: int) -> bool:
        """Whether the first node's module is around the second's."""
        owners = self._planner.owners
        return owners.get(one, one) in self._planner.ancestors.get(owners.get(other, other), ())

    def _may_be_in(self, one: int, other: int) -> bool:
        """Whether the first node may stand for a part of the call that the second one stands for.

        What a module reads of others comes after the module itself, so before a module it is of an earlier call.
        """
        owners = self._planner.owners
        of_one_call = other in owners and one != other and owners.get(one, one) == owners[other]
        return of_one_call or self._is_around(other, one)

    def _worth_keeping(self, param: int, position: int) -> bool:
        again = self._next_use(param, position - 1)
        if again is None:
            return False
        return again == position or self._traversed[again] - self._traversed[position] < self._budgets.reuse_numel

    def _make_room(self, position: int, need: tuple[int, ...], fetch_numel: int, node: int) -> tuple[int, ...]:
        limit = self._budgets.live_numel
        if self._live_numel + fetch_numel <= limit:
            return ()
        idle = [p for p in self._live if p not in need and self._holds[p] <= 0]
        last = len(self._steps)
        idle.sort(key=lambda p: (self._next_use(p, position) or last, p))
        evicted = []
        while idle and self._live_numel + fetch_numel > limit:
            param = idle.pop()
            evicted.append(param)
            self._drop([param], position)
        if self._live_numel + fetch_numel > limit:
            self._over_budget.setdefault(node, self._live_numel + fetch_numel)
        return tuple(sorted(evicted))

    def _choose_prefetch(self, position: int) -> tuple[int, ...]:
        """The next parameters in the order of their use, as far as both budgets go.

        Stops at the first that does not fit, so nothing that was prefetched has to wait behind a fetch that needs the
        room. While much of the last prefetch is still unused, waits until half a bucket is free: a collective for
        each module as it ends would cost more than it hides.
        """
        free = self._budgets.prefetch_numel - sum(self._planner.numel[p] for p in self._ahead)
        if self._ahead and 2 * free < self._budgets.prefetch_numel:
            return ()
        room = min(free, self._budgets.live_numel - self._live_numel)
        chosen: dict[int, None] = {}
        scan = max(self._scanned_to, position + 1)
        while scan < len(self._steps) and self._steps[scan].event is not Event.BACKWARD_END:
            for param in self._need(self._steps[scan]):
                if param in self._live or param in chosen:
                    continue
                numel = self._planner.numel[param]
                if numel > room:
                    self._scanned_to = scan
                    return self._start_prefetch(chosen)
                room -= numel
                chosen[param] = None
            scan += 1
        self._scanned_to = scan
        return self._start_prefetch(chosen)

    def _start_prefetch(self, chosen: Mapping[int, None]) -> tuple[int, ...]:
        self._in_flight = tuple(sorted(chosen))
        self._add(self._in_flight)
        self._ahead.update(self._in_flight)
        return self._in_flight


def _gather(params: Sequence[int]) -> Optional[Gather]:
    return Gather(tuple(params), fingerprint_of(params)) if params else None


def _fingerprint(decisions: Sequence[Decision]) -> int:
    numbers: list[int] = []
    for decision in decisions:
        numbers.extend(decision.step)
        for gather in (decision.fetch, decision.prefetch):
            numbers.append(gather.fingerprint if gather is not None else 0)
    return fingerprint_of(numbers)
