"""Keeping the ranks of one engine in step, or saying which of them are not.

[Note: how ranks agree]

A pass that only reads needs no other rank where partitions can be read without their owners (node_store.py). Otherwise
a gather needs all ranks of the partition group, and the ranks take their collectives in one of two ways.

*By script.* Ranks whose next steps are the same, with the same plan (one `Segment`, compared by its fingerprint), just
follow it. Each knows what the others will gather, in which order, so nothing is exchanged. Two words travel with the
payload of every gather: what is gathered, and a flag.

*By rounds.* Each rank tells all others where it stands (`Message`), all see the same messages, and `resolve` tells
every rank the same: who may go on, and what is gathered for them. A rank that waits still takes part in the gathers
that others need. So ranks that route tokens to different experts each get theirs, one that skips a block serves those
that do not, and where they meet again (all stand at one point, with one plan) they go on by script.

A rank that comes off the script cannot tell the others at once: they may stand in the next scripted gather. It takes
part in just that one, with the flag set, and goes into a round. The others see the flag, and do so as well. Since at
most one scripted gather is in flight at a time, all come off after the same one.

Where a forward without grad ends, the ranks agree on the script of the forward that they expect next, so that they need
no round when it begins. A rank that does something else comes off that script as off any other.

Modules at which ranks stood apart are *unsteady* from then on: no script leads through them. What was never apart pays
nothing.

Who changes partitions that others read does so between two rounds, at `Point.UPDATE` (an optimizer step has
`Point.STEP` for it) and at `Point.UPDATED`. Ranks that share a segment see in it who has come to a round and who is
getting on; a rank that is gets the time that it takes.

What no round can resolve (one rank reduces gradients while another begins its next forward), and a rank that does not
come at all, is a `LockstepError` on every rank that is there.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import pickle
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Optional

import torch
import torch.distributed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import pairwise
from deepspeed.runtime.zero.node_segment import Counter, NodeSegment

PERSISTENT = -1
"""Stands for all persistent parameters where a module's number is expected: a pass begins by making them whole."""

DEFAULT_TIMEOUT_S = 60.0
"""How long a rank waits for the others (``stage3_lockstep_timeout_s``)."""

GRACE_S = 2.0
"""How long a rank that gave up waits for the others to say where they are."""

POLL_S = 0.05

FIRST_PAUSES_S = (0.0,) * 20 + (5e-5,) * 200
PAUSE_S = 1e-3
"""How long a rank pauses between two looks at whether the others have come."""

MEETINGS_BETWEEN_FAILURES = 2**40

DIRECTIONS = (
    "All ranks have to make the same calls of forward, backward and step, the same number of times: look for a rank "
    "that skipped a batch, got fewer batches, left the loop after an exception or ended. If a rank is only slow, raise "
    "stage3_lockstep_timeout_s (now {timeout_s:g})."
)


class LockstepError(RuntimeError):
    """Ranks have come apart where they need each other. The text says which rank waits where."""


class Point(IntEnum):
    """Where a rank stands."""

    START = 0
    """It begins a forward pass."""
    FORWARD = 1
    """It enters a module."""
    BACKWARD = 2
    """It begins the backward of a module."""
    REDUCE = 3
    """It has a bucket of gradients to reduce."""
    LAST_REDUCE = 4
    """Its backward is over; what gradients it has left are to be reduced."""
    STEP = 5
    """It calls the optimizer."""
    END = 6
    """Its forward pass is over."""
    UPDATE = 7
    """It is about to change its partitions, outside of the optimizer's step."""
    UPDATED = 8
    """It has changed them, there or in the step."""
    SETUP = 9
    """It makes its engine."""


@dataclass(frozen=True)
class Message:
    """What one rank tells the others in a round."""

    point: Point
    node: int = 0
    """The module, as a number that is the same on all ranks; for START the kind of pass."""
    needs: bool = False
    """Something of the module is not whole on this rank."""
    plan: int = 0
    """Fingerprint of the segment that this rank would follow from here; 0 for none."""
    ready: int = 0
    """Fingerprint of the gradients that are ready to be reduced."""
    parked: int = 0
    """How many gradients wait for a chance to be reduced."""
    pass_number: int = 0

    def encode(self) -> list[int]:
        return [int(getattr(self, name)) for name in MESSAGE_FIELDS]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Message:
        point, node, needs, plan, ready, parked, pass_number = numbers
        return cls(Point(point), node, bool(needs), plan, ready, parked, pass_number)

    @property
    def place(self) -> tuple[Point, int]:
        return self.point, self.node


MESSAGE_FIELDS = tuple(field.name for field in dataclasses.fields(Message))
MESSAGE_WORDS = len(MESSAGE_FIELDS)


@dataclass(frozen=True)
class Resolution:
    """What follows from the messages of a round. The same on every rank."""

    going: frozenset[int]
    """Ranks that may go on; the others stay for the next round. Empty: nobody can."""
    gathers: tuple[int, ...]
    """Modules whose parameters all ranks gather now."""
    agreed: bool
    """All ranks stand at one point."""
    same_plan: bool
    """All ranks would follow the same segment from here."""
    unsteady: tuple[int, ...] = ()
    """Modules at which ranks turned out to be apart."""
    exchange_gradients: bool = False
    """Ranks have different gradients ready: they must say which."""


def resolve(messages: Sequence[Message], unsteady: Collection[int]) -> Resolution:
    """Decide a round. Pure, so every rank comes to the same result.

    Modules that ranks use differently come first, all at once; then the module that comes first in the model (last, in
    a backward): a rank that is ahead waits for those that are behind, so that they meet again.
    """
    first = messages[0]
    everyone = frozenset(range(len(messages)))
    if all(message.place == first.place for message in messages):
        return Resolution(
            going=everyone,
            gathers=(_wanted(first),) if any(message.needs for message in messages) else (),
            agreed=True,
            same_plan=all(message.plan == first.plan for message in messages),
            exchange_gradients=_gradients_differ(messages),
        )
    running = [message for message in messages if message.point in (Point.FORWARD, Point.BACKWARD)]
    # The end of a forward waits for those that are in theirs, and for nothing else.
    forward = any(message.point is Point.FORWARD for message in messages)
    ending = frozenset(rank for rank, message in enumerate(messages) if message.point is Point.END and not forward)
    if running or ending:
        served = {message.place for message in running if message.node in unsteady}
        if running and not served:
            served = {min((message.place for message in running), key=_order_in_model)}
        going = frozenset(rank for rank, message in enumerate(messages) if message.place in served)
        needed = {message.node for message in messages if message.place in served and message.needs}
        return Resolution(
            going=going | ending,
            gathers=tuple(sorted(needed)),
            agreed=False,
            same_plan=False,
            unsteady=tuple(sorted(node for _, node in served if node not in unsteady)),
        )
    points = {message.point for message in messages}
    if points == {Point.START}:
        # Different kinds of passes. Where they only read, the rounds to come give each rank what it needs.
        return Resolution(
            going=everyone,
            gathers=(PERSISTENT,) if any(message.needs for message in messages) else (),
            agreed=False,
            same_plan=False,
        )
    if points <= {Point.REDUCE, Point.LAST_REDUCE}:
        # Those that have more to come go on once what all have is reduced.
        return Resolution(
            going=frozenset(rank for rank, message in enumerate(messages) if message.point is Point.REDUCE),
            gathers=(),
            agreed=False,
            same_plan=False,
            exchange_gradients=True,
        )
    return Resolution(going=frozenset(), gathers=(), agreed=False, same_plan=False)


def _wanted(message: Message) -> int:
    return PERSISTENT if message.point is Point.START else message.node


def _order_in_model(place: tuple[Point, int]) -> tuple[int, int]:
    point, node = place
    return (point, node) if point is Point.FORWARD else (point, -node)


def _gradients_differ(messages: Sequence[Message]) -> bool:
    first = messages[0]
    if any(message.parked for message in messages):
        return first.point in (Point.BACKWARD, Point.REDUCE, Point.LAST_REDUCE)
    return first.point in (Point.REDUCE, Point.LAST_REDUCE) and any(m.ready != first.ready for m in messages)


@dataclass(frozen=True)
class GradientAgreement:
    """Which gradients all ranks reduce now. Indices of parameters; the same on every rank."""

    reduce: frozenset[int]
    """A rank that has none of these adds zeros."""
    park: frozenset[int]
    """Ready on some ranks only: they wait."""


def agree_on_gradients(
    points: Sequence[Point], ready: Sequence[Collection[int]], parked: Sequence[Collection[int]]
) -> GradientAgreement:
    """Settle what is reduced, from what is ``ready`` and what is ``parked`` on each rank.

    Where the backward of all is over, all that any rank has; before that what all have ready, and what is parked
    anywhere: the ranks have left the part of the model in which they differ.
    """
    any_parked = frozenset().union(*parked)
    any_ready = frozenset().union(*ready)
    if all(point is Point.LAST_REDUCE for point in points):
        return GradientAgreement(reduce=any_parked | any_ready, park=frozenset())
    all_ready = frozenset(ready[0]).intersection(*ready)
    reduce = all_ready | any_parked
    return GradientAgreement(reduce=reduce, park=any_ready - reduce)


@dataclass(frozen=True)
class ModuleNames:
    """What the numbers in messages stand for."""

    modules: Mapping[int, str]
    parameters: Mapping[int, Sequence[str]]
    """Names of the parameters that each module needs."""

    def describe(self, message: Message) -> str:
        module = self.modules.get(message.node, f"module {message.node}")
        if message.point in (Point.FORWARD, Point.BACKWARD):
            names = ", ".join(self.parameters.get(message.node, ())) or "none"
            what = "forward" if message.point is Point.FORWARD else "backward"
            text = f"the {what} of {module} (parameters: {names})"
        else:
            text = {
                Point.START: "the start of a forward pass",
                Point.REDUCE: "the reduction of gradients in its backward",
                Point.LAST_REDUCE: "the end of its backward",
                Point.STEP: "engine.step()",
                Point.END: "the end of its forward pass",
                Point.UPDATE: "a change of weights (GatheredParameters, load_state_dict, a checkpoint)",
                Point.UPDATED: "the end of a change of weights",
                Point.SETUP: "deepspeed.initialize",
            }[message.point]
        return f"{text}, pass {message.pass_number}"


class Peers:
    """The control group of one engine: small messages between its ranks, with a time limit.

    It is a gloo group of its own, so that what goes on in it has nothing to do with the data that the engine's ranks
    exchange, and ends when this object does.

    Args:
        group: the partition group; None for the world. Making a `Peers` is a collective of it.
        timeout_s: how long a rank waits for the others.

    All methods but `apart` and `close` are collectives too.
    """

    def __init__(self, group: Optional[torch.distributed.ProcessGroup], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.ranks = torch.distributed.get_process_group_ranks(group)
        self.rank = self.ranks.index(torch.distributed.get_rank())
        """This rank's place in the group, which is how messages count ranks."""
        self.rounds = 0
        self.segment: Optional[NodeSegment] = None
        """Shows whether a rank that does not come is getting on; it is waited for then, however long."""
        self._latest: Sequence[Message] = ()
        self._failures = 0
        self._store = torch.distributed.PrefixStore(
            f"zero3_lockstep/{self._agree_on_name(group)}", torch.distributed.distributed_c10d._get_default_store()
        )
        self._gloo: Optional[torch.distributed.ProcessGroupGloo] = None
        self._connect()

    def exchange(self, message: Message, names: ModuleNames) -> list[Message]:
        """Each rank's message, in rank order.

        Raises:
            LockstepError: not all ranks came in time.
        """
        mine = torch.tensor(message.encode(), dtype=torch.int64)
        everyones = torch.empty(len(self.ranks), MESSAGE_WORDS, dtype=torch.int64)
        self._all_gather(everyones, mine, message, names)
        self.rounds += 1
        self._latest = [Message.decode(row) for row in everyones.tolist()]
        return list(self._latest)

    def exchange_masks(self, mask: torch.Tensor, message: Message, names: ModuleNames) -> torch.Tensor:
        """``(ranks, len(mask))`` from each rank's uint8 ``mask``; all are equally long."""
        everyones = torch.empty(len(self.ranks), mask.numel(), dtype=torch.uint8)
        self._all_gather(everyones, mask, message, names)
        return everyones

    def exchange_objects(self, mine: Any, point: Point = Point.SETUP) -> list[Any]:
        """Each rank's object, in rank order. They are pickled.

        Raises:
            LockstepError: not all ranks came in time.
        """
        names = ModuleNames({}, {})
        message = Message(point)
        data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = torch.empty(len(self.ranks), 1, dtype=torch.int64)
        self._all_gather(sizes, torch.tensor([data.numel()]), message, names)
        everyones = torch.empty(len(self.ranks), int(sizes.max()), dtype=torch.uint8)
        self._all_gather(
            everyones, torch.nn.functional.pad(data, (0, everyones.size(1) - data.numel())), message, names
        )
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(everyones, sizes.view(-1).tolist())]

    def apart(self, messages: Sequence[Message], names: ModuleNames) -> LockstepError:
        """The error for ranks that all came, to places that no round can bring together."""
        where = [f"rank {self.ranks[i]} waits at {names.describe(m)}" for i, m in enumerate(messages)]
        return LockstepError(self._text(where))

    def missing(self, message: Message, names: ModuleNames, cause: BaseException) -> LockstepError:
        """The error for ranks that did not come; says what the others say of themselves.

        Gives up the connection, which may still hold a part of what failed; the next call makes a new one.
        """
        told = self._tell_and_ask(names.describe(message))
        where = []
        for index, rank in enumerate(self.ranks):
            if index == self.rank:
                where.append(f"rank {rank} (this one) waits at {names.describe(message)}")
            elif rank in told:
                where.append(f"rank {rank} waits at {told[rank]}")
            else:
                last = f"; it last was at {names.describe(self._latest[index])}" if self._latest else ""
                where.append(f"rank {rank} did not come{last}")
        self._gloo = None
        self._failures += 1
        if self.segment is not None:
            # Ranks that meet again count from here, whatever they had come to.
            self.segment.set(Counter.ARRIVALS, self._failures * MEETINGS_BETWEEN_FAILURES)
        reason = str(cause).strip().splitlines()
        return LockstepError(self._text(where) + (f" [{type(cause).__name__}: {reason[0]}]" if reason else ""))

    def connection(self) -> torch.distributed.ProcessGroupGloo:
        """The group that messages go through. Not to be kept: after a failure it is another one."""
        return self._gloo or self._connect()

    def close(self) -> None:
        """Give the control group up. Safe to call twice."""
        self._gloo = None

    def _agree_on_name(self, group: Optional[torch.distributed.ProcessGroup]) -> int:
        name = torch.tensor([uuid.uuid4().int >> 65], dtype=torch.int64, device=get_accelerator().current_device_name())
        dist.broadcast(name, src=self.ranks[0], group=group)
        return int(name.item())

    def _connect(self) -> torch.distributed.ProcessGroupGloo:
        store = torch.distributed.PrefixStore(f"gloo/{self._failures}", self._store)
        self._gloo = torch.distributed.ProcessGroupGloo(store, self.rank, len(self.ranks), self._timeout)
        return self._gloo

    def _all_gather(self, into: torch.Tensor, mine: torch.Tensor, message: Message, names: ModuleNames) -> None:
        try:
            into[self.rank] = mine
            self._line_up()
            pairwise.start(into, self.connection(), pairwise.Channel.CONTROL).wait(self._timeout)
        except RuntimeError as error:
            raise self.missing(message, names, error) from error

    def _line_up(self) -> None:
        """Wait until all ranks have come, as long as those that have not are getting on.

        Raises:
            RuntimeError: a rank has ended, or has not got on for `timeout_s`.
        """
        segment = self.segment
        if segment is None:
            return
        mine = segment.count(Counter.ARRIVALS)
        missing = [rank for rank in range(len(self.ranks)) if segment.counted(rank, Counter.ARRIVALS) < mine]
        pauses_s = itertools.chain(FIRST_PAUSES_S, itertools.repeat(PAUSE_S))
        seen: dict[int, int] = {}
        since = time.monotonic()
        while missing:
            time.sleep(next(pauses_s))
            missing = [rank for rank in missing if segment.counted(rank, Counter.ARRIVALS) < mine]
            progress = {rank: segment.counted(rank, Counter.PROGRESS) for rank in missing}
            if progress != seen:
                seen, since = progress, time.monotonic()
            dead = [self.ranks[rank] for rank in missing if not segment.is_alive(rank)]
            if dead:
                raise RuntimeError(f"ranks {dead} have ended")
            if time.monotonic() - since > self.timeout_s:
                late = [self.ranks[rank] for rank in missing]
                raise RuntimeError(f"ranks {late} have not got on for {self.timeout_s:g} s")

    def _text(self, where: Sequence[str]) -> str:
        directions = DIRECTIONS.format(timeout_s=self.timeout_s)
        return f"the ranks of a ZeRO-3 engine came apart: {'; '.join(where)}. {directions}"

    def _tell_and_ask(self, place: str) -> dict[int, str]:
        """Tell the others where this rank gave up, and wait shortly for what they tell."""
        told: dict[int, str] = {}
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        try:
            self._store.set(self._place_key(self.ranks[self.rank]), place)
            deadline = time.monotonic() + GRACE_S
            while len(told) < len(others) and time.monotonic() < deadline:
                for rank in others:
                    if rank not in told and self._store.check([self._place_key(rank)]):
                        told[rank] = self._store.get(self._place_key(rank)).decode()
                time.sleep(POLL_S)
        except (RuntimeError, torch.distributed.DistError):
            # The rank that holds the store has ended: then nobody can be asked.
            pass
        return told

    def _place_key(self, rank: int) -> str:
        return f"place/{self._failures}/{rank}"


def as_mask(indices: Collection[int], length: int) -> torch.Tensor:
    """uint8 vector with ones at ``indices``."""
    mask = torch.zeros(length, dtype=torch.uint8)
    if indices:
        mask[torch.tensor(sorted(indices))] = 1
    return mask


def indices_of(mask: torch.Tensor) -> list[int]:
    """Where ``mask`` is not zero, rising."""
    result: list[int] = mask.nonzero().view(-1).tolist()
    return result
