"""The order in which a model uses its modules: recorded, followed, and found again after a surprise.

A trace is a hint. It never raises and it is never trusted: whoever acts on it must be right when it is wrong. Nothing
here knows torch.

A *pass* is one forward of the root module and whatever follows before the next one: nothing for inference, a backward
for training. What happened in a pass is a *path*. A model whose control flow depends on the data has several; the last
few are kept, and which of them follows which is learned, so a model that alternates is predicted right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, Optional


class Event(IntEnum):
    """What a step of a path is."""

    START = 0
    """A forward of the root module begins. ``Step.node`` tells kinds of passes apart."""
    ENTER = 1
    """A module's forward begins."""
    LEAVE = 2
    """A module's forward has ended."""
    BACKWARD = 3
    """The backward of one use of a module begins."""
    REDUCE = 4
    """A bucket of gradients is reduced."""
    BACKWARD_END = 5
    """A backward is over, and with it the use of everything that it held."""
    END = 6
    """The outermost forward has ended. Ranks wait here for those that are still in theirs."""


class Step(NamedTuple):
    event: Event
    node: int


@dataclass(frozen=True)
class Path:
    """The steps of one pass, first to last."""

    steps: tuple[Step, ...]

    @cached_property
    def positions(self) -> dict[Step, tuple[int, ...]]:
        """Where each step occurs, in rising order."""
        found: dict[Step, list[int]] = {}
        for index, step in enumerate(self.steps):
            found.setdefault(step, []).append(index)
        return {step: tuple(indices) for step, indices in found.items()}


class Place(NamedTuple):
    """A position on a path: ``path.steps[index]`` is the step that was taken last."""

    path: Path
    index: int

    @property
    def ahead(self) -> tuple[Step, ...]:
        return self.path.steps[self.index + 1 :]


@dataclass
class Trace:
    """Follows a model's steps along the paths that it took before."""

    max_paths: int = 16
    max_steps: int = 100_000
    """A pass longer than this is not kept: someone calls modules without ever calling the root."""
    max_context: int = 64
    """How many steps back two places are compared when a step is looked for on other paths."""
    max_history: int = 32
    """How many passes back it is remembered which path was taken."""
    max_passes_of_context: int = 8
    """How many passes two points of the history are compared back when the next path is to be told."""
    surprises: int = 0
    """Steps that were not the expected one."""

    _paths: OrderedDict[tuple[Step, ...], Path] = field(default_factory=OrderedDict)
    _history: list[Path] = field(default_factory=list)
    """The paths of the last passes, one object for each path."""
    _recorded: list[Step] = field(default_factory=list)
    _path: Optional[Path] = None
    _index: int = 0

    @property
    def place(self) -> Optional[Place]:
        """Where the model is, or None where no known path leads through what it does."""
        return Place(self._path, self._index) if self._path is not None else None

    @property
    def recorded(self) -> Sequence[Step]:
        """The steps of the pass that is under way."""
        return self._recorded

    @property
    def paths(self) -> tuple[Path, ...]:
        """The known paths, the one that was taken last at the end."""
        return tuple(self._paths.values())

    def begin(self, start: Step) -> None:
        """A new pass begins with ``start``; the one before it is over and becomes a known path."""
        self._keep_recorded()
        self._recorded = [start]
        self._path = _expected_path(self._history, self.max_passes_of_context, start)
        self._index = 0

    @property
    def next_pass(self) -> Optional[Place]:
        """Where the next pass will begin if this one is over; None if it is not a path that is known."""
        this = self._paths.get(tuple(self._recorded))
        if this is None:
            return None
        path = _expected_path([*self._history, this], self.max_passes_of_context)
        return Place(path, 0) if path is not None else None

    def abandon(self) -> None:
        """The pass under way ended in an exception: what it did is no path to expect again."""
        self._recorded = []
        self._path = None

    def follow(self, step: Step) -> bool:
        """The model takes ``step``. True if it was the expected one; after False, `place` is where it was found."""
        expected = False
        if self._path is not None:
            following = self._index + 1
            steps = self._path.steps
            if following < len(steps) and steps[following] == step:
                self._index = following
                expected = True
        if not expected:
            self.surprises += 1
            self._path, self._index = self._find(step) or (None, 0)
        if len(self._recorded) <= self.max_steps:
            self._recorded.append(step)
        return expected

    def steps_until(self, step: Step) -> Optional[int]:
        """How many steps ahead ``step`` is taken next, if the model goes on as it did and this pass is followed by one
        like it; None if nothing is known of it."""
        if self._path is None:
            return None
        positions = self._path.positions.get(step)
        if not positions:
            return None
        following = bisect_right(positions, self._index)
        if following < len(positions):
            return positions[following] - self._index
        return len(self._path.steps) - self._index + positions[0]

    def clear(self) -> None:
        """Forget every path: the modules changed."""
        self._paths.clear()
        self._history.clear()
        self.abandon()

    def _keep_recorded(self) -> None:
        steps = tuple(self._recorded)
        if len(steps) < 2 or len(steps) > self.max_steps:
            return
        if steps not in self._paths:
            self._paths[steps] = Path(steps)
            while len(self._paths) > self.max_paths:
                _, forgotten = self._paths.popitem(last=False)
                self._history = [path for path in self._history if path is not forgotten]
        self._paths.move_to_end(steps)
        self._history.append(self._paths[steps])
        del self._history[: -self.max_history]

    def _find(self, step: Step) -> Optional[Place]:
        return self._on_same_prefix(step) or self._further_on(step) or self._elsewhere(step)

    def _on_same_prefix(self, step: Step) -> Optional[Place]:
        """Another path that agrees with this pass up to and including ``step``: a known branch was taken."""
        done = tuple(self._recorded)
        for path in reversed(self._paths.values()):
            if len(path.steps) > len(done) and path.steps[len(done)] == step and path.steps[: len(done)] == done:
                return Place(path, len(done))
        return None

    def _further_on(self, step: Step) -> Optional[Place]:
        """The same path, with something left out."""
        path = self._path
        if path is None:
            return None
        later = [i for i in path.positions.get(step, ()) if i > self._index]
        return Place(path, later[0]) if later else None

    def _elsewhere(self, step: Step) -> Optional[Place]:
        """The place on any path that looks most like the last steps of this pass."""
        best: Optional[Place] = None
        best_context = -1
        for path in reversed(self._paths.values()):
            for index in path.positions.get(step, ()):
                context = self._common_context(path, index)
                if context > best_context:
                    best, best_context = Place(path, index), context
        return best

    def _common_context(self, path: Path, index: int) -> int:
        longest = min(index, len(self._recorded), self.max_context)
        for back in range(1, longest + 1):
            if path.steps[index - back] != self._recorded[-back]:
                return back - 1
        return longest


def _expected_path(history: Sequence[Path], max_context: int, start: Optional[Step] = None) -> Optional[Path]:
    """The path that was taken when the passes before were most like the last ones (of those that begin so)."""
    best: Optional[Path] = None
    best_context = -1
    for index in range(len(history) - 1, -1, -1):
        path = history[index]
        if path is best or (start is not None and path.steps[0] != start):
            continue
        context = _common_passes(history, index, max_context)
        if context > best_context:
            best, best_context = path, context
    return best


def _common_passes(history: Sequence[Path], index: int, max_context: int) -> int:
    longest = min(index, max_context)
    for back in range(1, longest + 1):
        if history[index - back] is not history[-back]:
            return back - 1
    return longest
