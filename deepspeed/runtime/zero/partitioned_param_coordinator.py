"""Makes sure that what a module needs is whole while it runs, and partitioned otherwise.

`PartitionedParameterCoordinator` is told what modules do (`begin_pass`, `enter`, `leave`, ...), asks `Trace` what will
come and `Planner` what to do about it, and has `Gatherer` do it. It decides one thing itself: whether this rank follows
the script or goes by rounds ([Note: how ranks agree] in lockstep.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

import torch
from deepspeed.runtime.zero.fetch_plan import (
    EMPTY_SEGMENT,
    Budgets,
    Decision,
    Gather,
    Need,
    Planner,
    Segment,
    fingerprint_of,
)
from deepspeed.runtime.zero.gather import Collective, Gatherer, GatherFailed, PartUnreadable, Statistics
from deepspeed.runtime.zero.lockstep import (
    PERSISTENT,
    GradientAgreement,
    LockstepError,
    Message,
    ModuleNames,
    Peers,
    Point,
    agree_on_gradients,
    as_mask,
    indices_of,
    resolve,
)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.residents import is_resident
from deepspeed.runtime.zero.trace import Event, Path, Place, Step, Trace
from deepspeed.utils.logging import logger
from torch.nn import Module, Parameter

MAX_CACHED_SEGMENTS = 256
FIRST_EXTERNAL = PERSISTENT - 1
"""Numbers from here downwards stand for a parameter that a module reads of another."""
PASS_KINDS = 2
"""A pass of each outermost module with and without grad."""


def get_all_parameters(sub_module: Module, recurse: bool = False) -> Iterator[tuple[Any, Parameter]]:
    """Names (keys, for external ones) and parameters of a module and those registered as external to it."""
    return itertools.chain(sub_module.named_parameters(recurse=recurse), sub_module.ds_external_parameters())


def iter_params(module: Module, recurse: bool = False) -> Iterator[Parameter]:
    """A module's parameters and those registered as external to it."""
    return (param for _, param in get_all_parameters(module, recurse))


@dataclass(eq=False)
class Node:
    """What fetches: a module, or one more parameter that a module reads of another."""

    index: int
    """The same on all ranks."""
    name: str
    params: tuple[int, ...]
    """What has to be whole while it runs and is not persistent. Never changes, so ranks need not compare it."""
    external: list[Node] = field(default_factory=list)
    """Parameters of other modules that this one reads, one node each."""
    enter: Step = field(init=False)
    leave: Step = field(init=False)
    backward: Step = field(init=False)

    def __post_init__(self) -> None:
        self.enter = Step(Event.ENTER, self.index)
        self.leave = Step(Event.LEAVE, self.index)
        self.backward = Step(Event.BACKWARD, self.index)


@dataclass(eq=False)
class Use:
    """One call of a module, from its forward to the end of its backward."""

    node: Node
    begin: int
    """Moments count entering and leaving of modules; a later call has later ones."""
    end: int = -1
    external: tuple[Node, ...] = ()
    in_backward: list[int] = field(default_factory=list)
    """The numbers of its nodes whose backward has begun."""
    forward_task: int = -1
    """The backward (graph task of autograd) in which its forward ran, to recompute it."""
    task: int = -1
    """The backward that it takes part in."""
    thread: int = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node, *self.external)

    @property
    def needs_anything(self) -> bool:
        return bool(self.node.params or self.external)


class Gradients(Protocol):
    """Who reduces gradients: the optimizer."""

    def ready(self) -> Sequence[int]:
        """Parameters whose gradients are in the bucket."""

    def parked(self) -> Sequence[int]:
        """Parameters whose gradients wait because ranks do not agree on them."""

    def settle(self, agreement: GradientAgreement) -> None:
        """Reduce and park what all ranks agreed on. A collective."""

    def give_up(self) -> None:
        """Another one trains the parameters from now on."""


class PartitionedParameterCoordinator:
    """Carries out what the plan says.

    Args:
        gatherer: makes parameters whole.
        budgets: limits for the plan.
        peers: the other ranks; None if there are none to keep in step with.
        log_surprises: tell about every change of the model's path (``log_trace_cache_warnings``).

    Not thread-safe, but for `enter_backward`, which autograd calls from its threads.
    """

    def __init__(
        self, gatherer: Gatherer, budgets: Budgets, peers: Optional[Peers], log_surprises: bool = False
    ) -> None:
        self.gatherer = gatherer
        self.gradients: Optional[Gradients] = None
        self.on_hold: Optional[Callable[[int], None]] = None
        """Called with a parameter that the first user begins to hold, when it is whole."""
        self.on_unhold: Optional[Callable[[int], None]] = None
        """Called with a parameter that its last user lets go of, while it is still whole."""
        self.hierarchy = 0
        self._budgets = budgets
        self._peers = peers
        self._log_surprises = log_surprises
        self._trace = Trace()
        self._needs: dict[int, Need] = {}
        self._ancestors: dict[int, frozenset[int]] = {}
        self._owners: dict[int, int] = {}
        self._users: dict[int, list[int]] = {}
        """For each parameter, the nodes that need it."""
        self._planner = Planner(budgets, self._needs, gatherer.numel, self._ancestors, self._owners)
        self._segments: dict[tuple[Any, ...], tuple[Optional[Path], Segment]] = {}
        self._module_names: dict[int, str] = {}
        self._parameter_names: dict[int, list[str]] = {}
        self._names = ModuleNames(self._module_names, self._parameter_names)
        self._persistent: list[int] = []
        self._unsteady: set[int] = set()
        self._warned: set[int] = set()

        self._script: Optional[Segment] = None
        """What this rank follows; None while it goes by rounds."""
        self._cursor = 0
        self._in_flight: Optional[Collective] = None
        self._script_is_alone = False
        """The script needs no other rank."""
        self.reads_alone = False
        """No pass needs another rank; else those with grad do, if there are peers."""
        self._pass_is_alone = False
        self._pass_number = 0
        self._moment = 0
        self._open: list[Use] = []
        """Calls whose forward has not ended, outermost first."""
        self._backward_uses: list[Use] = []
        self._tasks: list[int] = []
        """Backwards that are running, outermost first: reentrant checkpointing nests them."""
        self._holds: dict[int, int] = {}
        self._recomputed: list[int] = []
        """Frozen parameters of modules whose forward checkpointing has recomputed. It keeps those parameters, not what
        they held, and looks at them once more before the backward goes on."""
        self._overdue: set[int] = set()
        """Released by plan while still held: they go with their last user."""
        self._lock = threading.RLock()
        self._failure: Optional[str] = None

    # -- the model --

    @property
    def statistics(self) -> Statistics:
        statistics = self.gatherer.statistics
        statistics.rounds = self._peers.rounds if self._peers is not None else 0
        return statistics

    @property
    def fetches(self) -> bool:
        """Whether any module needs something that is not always whole."""
        return bool(self._needs)

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return bool(self._open) or _in_backward()

    def set_persistent(self, params: Iterable[Parameter]) -> None:
        """Parameters that are made whole as a pass begins and stay so."""
        self._persistent = [self._index(p) for p in params]

    def add_node(self, index: int, name: str, params: Iterable[Parameter], ancestors: Iterable[int]) -> Node:
        """A module that needs ``params``. All ranks add the same."""
        node = Node(index, name, tuple(sorted(self._index(p) for p in params)))
        self._module_names[index] = name
        self._ancestors[index] = frozenset(ancestors)
        self._parameter_names[index] = [self.gatherer.names[p] for p in node.params]
        if node.params:
            self._needs[index] = Need(node.params, sum(self.gatherer.numel[p] for p in node.params))
        for param in node.params:
            self._users.setdefault(param, []).append(index)
        return node

    def add_external(self, node: Node, param: Parameter) -> None:
        """The module of ``node`` reads ``param`` of another. Ranks may come to know this at different times."""
        external = self._external_node(node, self._index(param))
        if all(known.index != external.index for known in node.external):
            node.external.append(external)

    def _external_node(self, node: Node, param: int) -> Node:
        number = FIRST_EXTERNAL - (node.index * len(self.gatherer.params) + param)
        self._learn_external(number)
        return Node(number, node.name, (param,))

    def _learn_external(self, number: int) -> None:
        """Each rank can tell from the number alone which module reads which parameter."""
        if number in self._needs:
            return
        owner, param = divmod(FIRST_EXTERNAL - number, len(self.gatherer.params))
        self._needs[number] = Need((param,), self.gatherer.numel[param])
        self._users.setdefault(param, []).append(number)
        self._owners[number] = owner
        self._module_names[number] = self._describe(owner)
        self._parameter_names[number] = [self.gatherer.names[param]]

    def _index(self, param: Parameter) -> int:
        index = self.gatherer.index_of(param)
        if index is None:
            raise ValueError(
                f"parameter of shape {tuple(param.ds_shape)} is used by a module of this engine but was not in the "
                "model when deepspeed.initialize was called: add it before"
            )
        return index

    def steps_until_use(self, param: int) -> Optional[int]:
        """How many steps ahead a parameter is needed next; None if that is not known."""
        found = [
            steps
            for node in self._users.get(param, ())
            for event in (Event.ENTER, Event.BACKWARD)
            if (steps := self._trace.steps_until(Step(event, node))) is not None
        ]
        return min(found, default=None)

    def forget_paths(self) -> None:
        """The modules changed: what was recorded says nothing any more."""
        if not self._is_ahead:  # Then the next pass comes off, if it has to.
            self._come_off()
        self._trace.clear()
        self._segments.clear()

    # -- forward --

    def enter(self, node: Node, outermost: int, grad: bool) -> Use:
        """A module's forward begins; when this returns, its parameters are whole."""
        if not self._open and not _in_backward():
            self.begin_pass(outermost, grad)
        self._moment += 1
        use = Use(node, self._moment, forward_task=torch._C._current_graph_task_id())
        self._advance(node.enter, Point.FORWARD, node)
        self._hold(node.params)
        self._open.append(use)
        if node.external:
            for external in tuple(node.external):
                self._enter_external(use, external)
        return use

    def _enter_external(self, use: Use, external: Node) -> None:
        self._advance(external.enter, Point.FORWARD, external)
        self._hold(external.params)
        use.external = (*use.external, external)

    def leave(self, node: Node) -> Optional[Use]:
        """A module's forward has ended. Returns its use, for `enter_backward`; None if it was not entered."""
        if not self._open:
            return None
        if self._open[-1].node is node:
            return self._leave_innermost()
        if all(use.node is not node for use in self._open):
            return None
        while True:
            use = self._leave_innermost()
            # A module inside that raised, and whose exception was caught, did not tell that it ended.
            if use.node is node:
                return use

    def _leave_innermost(self) -> Use:
        use = self._open.pop()
        self._moment += 1
        use.end = self._moment
        for part in reversed(use.nodes) if use.external else (use.node,):
            if use.forward_task == -1:
                self._unhold(part.params)
            else:
                frozen = [p for p in part.params if not self.gatherer.params[p].requires_grad]
                self._recomputed.extend(frozen)
                self._unhold([p for p in part.params if p not in frozen])
            self._advance(part.leave, ended=part.params)
        return use

    def begin_pass(self, outermost: int, grad: bool) -> None:
        """An outermost forward begins."""
        if self._failure is not None:
            raise LockstepError(self._failure)
        start = Step(Event.START, outermost * PASS_KINDS + grad)
        script = self._script
        ready = not self.gatherer.missing(self._persistent)
        if script is None or not self._is_ahead or script.decisions[0].step != start or not ready:
            self._come_off()
        # Where all parameters are persistent, a pass with grad has no round either: to one that makes them whole only
        # those would come that have not read them since the last step.
        self._pass_is_alone = self.gatherer.store is not None and not (grad and self.fetches)
        if self._open or self._backward_uses or self._tasks:
            self._recover()
        self._pass_number += 1
        self._trace.begin(start)
        if self._script is not None:
            self._carry_out(self._script, self._script.decisions[0])
        elif self.fetches or not ready:
            self._go_on(Point.START, start.node, self._trace.place)

    def end_pass(self, grad: bool) -> None:
        """The outermost forward has ended, or raised. A rank that is through serves those that are not."""
        self._advance(Step(Event.END, 0))
        if not grad:
            if self._script is not None and self._cursor == len(self._script.decisions):
                self._script = None
            self._drain()
            self._drop_idle()
        if self.fetches and self._is_alone == (self.reads_alone or self._peers is None):
            # Without grad this is the end: what ranks agree on here saves them the round at the next start.
            self._go_on(Point.END, 0, self._trace.next_pass if not grad else None)
        self._pass_is_alone = False

    @property
    def _is_alone(self) -> bool:
        """Whether what is done now needs no other rank."""
        return self._peers is None or self.reads_alone or (self._pass_is_alone and not _in_backward())

    @property
    def _is_ahead(self) -> bool:
        """Whether the script is that of the next pass, which has not begun."""
        return self._script is not None and self._cursor == 0

    def wait_for_flight(self) -> None:
        """Let nothing be in flight: someone is about to gather or partition on their own, on all ranks."""
        if self._drain():
            self._script = None

    def is_held(self, param: Parameter) -> bool:
        """Whether a running module uses ``param``."""
        return self.gatherer.index_of(param) in self._holds

    def is_in_forward_of(self, index: int) -> bool:
        return any(use.node.index == index for use in self._open)

    @property
    def innermost(self) -> Optional[int]:
        """The number of the module that was entered last and has not been left."""
        return self._open[-1].node.index if self._open else None

    def abandon_forward(self) -> None:
        """A forward ended in a way that no hook saw."""
        self._recover()

    def read_outside(self, param: Parameter) -> None:
        """The model reads ``param``, which is not whole, outside the module that it belongs to.

        It is whole when this returns, and as long as the innermost running module runs.
        """
        use = self._open[-1] if self._open else self._backward_uses[-1] if self._backward_uses else None
        index = self._index(param)
        if use is not None:
            self._enter_external(use, self._external_node(use.node, index))
        else:
            external = self._external_node(Node(0, self._describe(0), ()), index)
            self._advance(external.enter, Point.FORWARD, external)

    # -- backward --

    def enter_backward(self, use: Use) -> None:
        """The backward of a module's use begins; when this returns, its parameters are whole. Once for each graph."""
        with self._lock:
            task = torch._C._current_graph_task_id()
            if use.task == task:
                return
            use.task = task
            use.thread = threading.get_ident()
            if task not in self._tasks:
                self._tasks.append(task)
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_task(task))
            self._end_recomputation(task)
            # Autograd goes strictly from the last operation to the first, on each of its threads: what was called after
            # this use is over. Not what is around it or in it, and not what came before: a module that returns what
            # another one returned shares its tensor. A nested backward ends nothing of the one that it is in.
            ended = self._end_backward_uses(
                lambda other: other.task == task and other.thread == use.thread and other.begin >= use.end
            )
            use.in_backward.clear()
            self._backward_uses.append(use)
            for part in use.nodes:
                self._advance(part.backward, Point.BACKWARD, part, ended)
                self._hold(part.params)
                use.in_backward.append(part.index)

    def end_backward(self) -> None:
        """All backwards are over. Nothing happens if none was under way."""
        with self._lock:
            if not self._backward_uses and not self._tasks:
                return
            for task in self._tasks:
                self._end_recomputation(task)
            self._tasks.clear()
            self._end_backward_uses(lambda other: True)
            self._advance(Step(Event.BACKWARD_END, 0))
            if self._script is None and not self._open:
                self._drain()
                self._drop_idle()

    def _end_recomputation(self, task: int) -> None:
        """Checkpointing leaves a forward that it recomputes by an exception, as soon as it has what it needs."""
        while self._open and self._open[-1].forward_task == task:
            self._leave_innermost()
        recomputed, self._recomputed = self._recomputed, []
        self._unhold(recomputed)
        if self._script is None:
            self._drop_all(recomputed)

    def _end_task(self, task: int) -> None:
        """Called by autograd when one of its graph tasks is done."""
        with self._lock:
            self._end_recomputation(task)
            if self._tasks == [task]:
                self.end_backward()
            elif task in self._tasks:
                ended = self._end_backward_uses(lambda other: other.task == task)
                if self._script is None:
                    self._drop_all(ended)
                self._tasks.remove(task)

    def _end_backward_uses(self, over: Callable[[Use], bool]) -> list[int]:
        """End those that are over. Returns what they held."""
        ended = [use for use in self._backward_uses if over(use)]
        self._backward_uses = [use for use in self._backward_uses if not over(use)]
        params = [p for use in reversed(ended) for part in use.nodes for p in part.params]
        self._unhold(params)
        return params

    # -- gradients and optimizer --

    def agree_on_reduction(self, last: bool) -> None:
        """Before gradients are reduced: all ranks reduce the same ones. `Gradients.settle` was called if they had to
        be told apart.

        Raises:
            LockstepError: the other ranks are somewhere else.
        """
        if self._peers is None:
            return
        with self._lock:
            if last:
                self._finish_backward_of_script()
                self._meet(Point.LAST_REDUCE, 0, None)
            else:
                self._advance(Step(Event.REDUCE, 0))
                self._meet(Point.REDUCE, 0, None)

    def agree_on_step(self) -> None:
        """Before the optimizer's step.

        Raises:
            LockstepError: the other ranks are somewhere else.
        """
        if self._peers is not None:
            self._come_off()
            self._meet(Point.STEP, 0, None)

    def agree_on_update(self) -> None:
        """Before partitions that other ranks read are changed: nobody reads any more when this returns.

        Raises:
            LockstepError: the other ranks are somewhere else.
        """
        if self.gatherer.store is not None:
            self._come_off()
            self._meet(Point.UPDATE, 0, None)

    def publish_update(self) -> None:
        """After it: all have made their changes when this returns.

        Raises:
            LockstepError: the other ranks are somewhere else.
        """
        if self.gatherer.store is not None:
            self._meet(Point.UPDATED, 0, None)

    # -- everything at once --

    def release_and_reset_all(self, module: Module) -> None:
        """Partition every parameter of ``module``, persistent ones too, whatever was going on."""
        self._recover()
        for param in module.parameters():
            if not hasattr(param, "ds_status") or is_resident(param):
                continue
            param.ds_active_sub_modules.clear()
            if param.ds_status is ZeroParamStatus.AVAILABLE:
                index = self.gatherer.index_of(param)
                if index is None:
                    param.partition()
                else:
                    self.gatherer.release(index)

    def release_backward_leftovers(self) -> None:
        """The engine's backward is over."""
        if not _in_backward() or len(self._tasks) <= 1:
            self.end_backward()

    def close(self) -> None:
        """Give up everything. The coordinator is of no use any more."""
        self._trace.clear()
        self._segments.clear()
        if self._peers is not None:
            self._peers.close()

    # -- names that others know --

    def is_complete_trace(self) -> bool:
        return bool(self._trace.paths)

    def is_record_trace(self) -> bool:
        return not self._trace.paths and bool(self._trace.recorded)

    def is_invalid_trace(self) -> bool:
        return not self._trace.paths and not self._trace.recorded

    def _invalidate_trace(self) -> None:
        self.forget_paths()

    # -- by script --

    def _advance(
        self,
        step: Step,
        point: Optional[Point] = None,
        node: Optional[Node] = None,
        ended: Sequence[int] = (),
    ) -> None:
        """The model takes ``step``. At a ``point``, what ``node`` needs is whole when this returns.

        ``ended`` is what users held that have just ended: without a script it is released at once.
        """
        if self.gatherer.store is not None:
            self.gatherer.store.show_progress()
        if not self._trace.follow(step) and self._log_surprises:
            logger.warning("ZeRO-3 trace: %s of %s was not expected", step.event.name, self._describe(step.node))
        script = self._script
        if script is not None:
            decision = script.decisions[self._cursor] if self._cursor < len(script.decisions) else None
            if decision is not None and decision.step == step:
                self._carry_out(script, decision)
            else:
                self._come_off()
        if self._script is None and ended:
            self._drop_all(p for p in ended if node is None or p not in node.params)
        if node is None or point is None or not node.params:
            return
        if self._script is not None:
            if self.gatherer.are_whole(node.params):
                return
            # Someone partitioned what the plan takes for whole.
            self._come_off()
        self._go_on(point, node.index, self._trace.place, node)

    def _carry_out(self, script: Segment, decision: Decision) -> None:
        """Do what the plan says for the step that the cursor is at. The script is over if another rank came off it."""
        self._cursor += 1
        for param in decision.release:
            self._drop(param)
        if decision.gathers:
            gatherer = self.gatherer
            if decision.wait and self._drain():
                self._script = None
                return
            if decision.fetch is not None:
                collective = self._start(decision.fetch, decision.step, alone=self._script_is_alone)
                if self._finish(collective, decision.step):
                    self._script = None
                    return
            if decision.prefetch is not None:
                self._in_flight = self._start(decision.prefetch, decision.step, alone=self._script_is_alone)
                gatherer.unused.update(self._in_flight.arriving)
        if not script.complete and self._cursor == len(script.decisions):
            self._script = None

    def _come_off(self) -> None:
        """Leave the script, if there is one. If other ranks may follow it still, take part in its next gather and
        raise the flag."""
        script, cursor = self._script, self._cursor
        self._script = None
        if script is None or self._drain() or self._script_is_alone:
            return
        for decision in script.decisions[cursor:]:
            if decision.step.event in (Event.REDUCE, Event.END):
                return  # The others come into a round there.
            gather = decision.fetch or decision.prefetch
            if gather is not None:
                numel = sum(self.gatherer.numel[p] for p in self.gatherer.missing(gather.params))
                ahead = sum(self.gatherer.numel[p] for p in self.gatherer.unused)
                fits = (
                    ahead + numel <= self._budgets.prefetch_numel
                    and self.statistics.live_numel + numel <= self._budgets.live_numel
                )
                collective = self._start(gather, decision.step, flag=True, adopt=None if fits else ())
                self.gatherer.unused.update(collective.arriving)
                self._finish(collective, decision.step)
                return

    def _finish_backward_of_script(self) -> None:
        """The backward ended; steps that only end it are no reason to come off."""
        script = self._script
        rest = script.decisions[self._cursor :] if script is not None else ()
        if any(d.fetch or d.prefetch or d.wait for d in rest):
            self._come_off()

    def _drain(self) -> bool:
        """Wait for what is in flight. True if another rank came off the script."""
        collective, self._in_flight = self._in_flight, None
        return collective is not None and self._finish(collective, None)

    def _start(
        self,
        gather: Gather,
        step: Optional[Step],
        flag: bool = False,
        adopt: Optional[Collection[int]] = None,
        alone: bool = False,
    ) -> Collective:
        try:
            return self.gatherer.start(gather.params, gather.fingerprint, flag, adopt, alone)
        except GatherFailed as error:
            raise self._gather_failed(error, step) from error
        except OSError:
            self._script = None
            raise

    def _finish(self, collective: Collective, step: Optional[Step]) -> bool:
        try:
            return self.gatherer.finish(collective)
        except GatherFailed as error:
            raise self._gather_failed(error, step) from error
        except (PartUnreadable, OSError):
            # All ranks know of it, so all leave the script here.
            self._script = None
            raise

    def _gather_failed(self, error: GatherFailed, step: Optional[Step]) -> LockstepError:
        self._script = None
        if self._peers is None:
            raise error
        node = step.node if step is not None else (self._open[-1].node.index if self._open else -1)
        point = Point.BACKWARD if _in_backward() else Point.FORWARD
        if step is not None and step.event is Event.START:
            point = Point.START
        message = Message(point, node, pass_number=self._pass_number)
        failure = self._peers.missing(message, self._names, error)
        if self.gatherer.connection is None:
            # The partition group may still hold a part of this gather: nothing after it could be trusted.
            self._failure = f"this engine cannot go on after: {failure}"
        return failure

    # -- alone --

    def _go_on(self, point: Point, number: int, place: Optional[Place], node: Optional[Node] = None) -> None:
        """Make whole what ``node`` needs, with the other ranks if it takes them. From ``place`` on, a script may
        lead."""
        if not self._is_alone:
            self._meet(point, number, place, node)
            return
        wanted = node.params if node is not None else self._persistent if point is Point.START else ()
        missing = self.gatherer.missing(wanted)
        if missing:
            self._make_room(wanted, number)
            self._finish(self._start(Gather(tuple(missing), fingerprint_of(missing)), None, alone=True), None)
        self._follow(self._propose(place), point)

    def read_whole(self, params: Iterable[Parameter]) -> None:
        """Make ``params`` whole for somebody who will partition them. No other rank is needed."""
        missing = self.gatherer.missing(self._index(param) for param in params)
        if missing:
            self._finish(self._start(Gather(tuple(missing), 0), None, alone=True), None)
        for index in missing:
            self.gatherer.hand_over(index)

    # -- by rounds --

    def _meet(self, point: Point, number: int, place: Optional[Place], node: Optional[Node] = None) -> None:
        """Go on when the other ranks are ready for it, and make whole what ``node`` needs. From ``place`` on, a script
        may lead."""
        if self._peers is None:
            return
        wanted = node.params if node is not None else self._persistent if point is Point.START else ()
        while True:
            proposal = self._propose(place) if self._script is None else EMPTY_SEGMENT
            message = self._message(point, number, bool(self.gatherer.missing(wanted)), proposal.fingerprint)
            messages = self._peers.exchange(message, self._names)
            resolution = resolve(messages, self._unsteady)
            if not resolution.going:
                self._script = None
                raise self._peers.apart(messages, self._names)
            if not resolution.agreed:
                self._part(resolution.unsteady, wanted)
            mine = self._peers.rank in resolution.going
            for gathered in resolution.gathers:
                is_mine = mine and gathered == (PERSISTENT if point is Point.START else number)
                self._serve(gathered, wanted if is_mine else ())
            if resolution.exchange_gradients:
                self._exchange_gradients(messages, message)
            if mine:
                break
        if resolution.agreed and resolution.same_plan:
            self._follow(proposal, point)

    def _message(self, point: Point, number: int, needs: bool, plan: int) -> Message:
        gradients = self.gradients
        return Message(
            point=point,
            node=number,
            needs=needs,
            plan=plan,
            ready=fingerprint_of(gradients.ready()) if gradients is not None and _reduces(point) else 0,
            parked=len(gradients.parked()) if gradients is not None else 0,
            pass_number=self._pass_number,
        )

    def _propose(self, place: Optional[Place]) -> Segment:
        """What this rank would follow from ``place`` on."""
        if place is None:
            return EMPTY_SEGMENT
        held = tuple(sorted(p for p, count in self._holds.items() if p in self.gatherer.whole for _ in range(count)))
        idle = tuple(sorted(p for p in self.gatherer.whole if p not in self._holds))
        ahead = tuple(p for p in idle if p in self.gatherer.unused)
        in_backward = tuple(number for use in self._backward_uses for number in use.in_backward)
        # Where ranks differ is of no interest to one that is alone.
        unsteady = frozenset() if self._is_alone else self._unsteady
        key = (id(place.path), place.index, held, idle, ahead, in_backward, len(unsteady))
        known = self._segments.get(key)
        if known is None:
            steps = place.path.steps[place.index :]
            segment = self._planner.plan(steps, unsteady, held, idle, ahead, in_backward)
            if len(self._segments) >= MAX_CACHED_SEGMENTS:
                self._segments.pop(next(iter(self._segments)))
            # The path is kept with it, so that its id stays its own.
            known = self._segments[key] = (place.path, segment)
        return known[1]

    def _follow(self, segment: Segment, point: Point) -> None:
        if segment.decisions:
            for node, numel in segment.over_budget:
                self._warn_over_budget(node, numel)
            self._script = segment
            self._script_is_alone = self._is_alone
            self._cursor = 0
            if point is not Point.END:
                self._carry_out(segment, segment.decisions[0])

    def _part(self, unsteady: Iterable[int], wanted: Collection[int]) -> None:
        """Ranks stand apart: no script holds, and what is whole by chance is no common ground."""
        self._drain()
        self._script = None
        self._unsteady.update(unsteady)
        self._drop_idle(besides=wanted)

    def _serve(self, gathered: int, wanted: Sequence[int]) -> None:
        """Gather what a module needs, with all ranks, and keep what this one wants of it."""
        if gathered <= FIRST_EXTERNAL:
            self._learn_external(gathered)
        params = self._persistent if gathered == PERSISTENT else self._needs[gathered].params
        self._make_room(wanted, gathered)
        step = Step(Event.ENTER, gathered)
        self._finish(self._start(Gather(tuple(params), fingerprint_of(params)), step, adopt=wanted), step)

    def _exchange_gradients(self, messages: Sequence[Message], message: Message) -> None:
        gradients, peers = self.gradients, self._peers
        if gradients is None or peers is None:
            return
        length = len(self.gatherer.params)
        ready = gradients.ready() if _reduces(message.point) else ()
        masks = torch.cat([as_mask(ready, length), as_mask(gradients.parked(), length)])
        everyones = peers.exchange_masks(masks, message, self._names).view(len(messages), 2, length)
        gradients.settle(
            agree_on_gradients(
                [m.point for m in messages],
                [indices_of(row[0]) for row in everyones],
                [indices_of(row[1]) for row in everyones],
            )
        )

    # -- what is whole --

    def _hold(self, params: Iterable[int]) -> None:
        holds, gatherer = self._holds, self.gatherer
        for param in params:
            count = holds.get(param, 0)
            holds[param] = count + 1
            if count:
                self._overdue.discard(param)
            else:
                gatherer.unused.discard(param)
                gatherer.params[param].ds_active_sub_modules.add(param)
                if self.on_hold is not None:
                    self.on_hold(param)

    def _unhold(self, params: Iterable[int]) -> None:
        holds, gatherer = self._holds, self.gatherer
        for param in params:
            count = holds.get(param, 0) - 1
            if count > 0:
                holds[param] = count
            elif count == 0:
                del holds[param]
                gatherer.params[param].ds_active_sub_modules.clear()
                if self.on_unhold is not None:
                    self.on_unhold(param)
                if param in self._overdue:
                    self._overdue.discard(param)
                    self._drop(param)

    def _drop(self, param: int) -> None:
        if param in self._holds:
            self._overdue.add(param)
            return
        if param in self.gatherer.unused:
            self._log_discard(param)
        self.gatherer.release(param)

    def _drop_all(self, params: Iterable[int]) -> None:
        for param in params:
            if param in self.gatherer.whole and param not in self._holds:
                self._drop(param)

    def _drop_idle(self, besides: Collection[int] = ()) -> None:
        for param in [p for p in self.gatherer.whole if p not in self._holds and p not in besides]:
            self._drop(param)

    def _make_room(self, wanted: Sequence[int], number: int) -> None:
        """Without a plan, what nobody uses makes room for what is needed now."""
        missing = self.gatherer.missing(wanted)
        numel = sum(self.gatherer.numel[p] for p in missing if not self.gatherer.params[p].ds_persist)
        limit = self._budgets.live_numel
        for param in [p for p in self.gatherer.whole if p not in self._holds and p not in wanted]:
            if self.statistics.live_numel + numel <= limit:
                return
            self._drop(param)
        if numel and self.statistics.live_numel + numel > limit:
            self._warn_over_budget(number, self.statistics.live_numel + numel)

    def _recover(self) -> None:
        """Forget what was going on when an exception ended it, and release everything that is not persistent."""
        with self._lock:
            if self._open or self._backward_uses or self._tasks:
                self._open.clear()
                self._backward_uses.clear()
                self._tasks.clear()
                self._trace.abandon()
            self._recomputed.clear()
            for param in list(self._holds):
                self._holds[param] = 1
                self._unhold([param])
            self._drain()
            self._drop_idle()

    # -- words --

    def _describe(self, node: int) -> str:
        return self._module_names.get(node, f"module {node}")

    def _warn_over_budget(self, node: int, numel: int) -> None:
        if node not in self._warned:
            self._warned.add(node)
            logger.warning(
                "ZeRO-3: while %s runs, %d elements have to be whole, more than stage3_max_live_parameters=%d allows. "
                "Raise it, or split the module.",
                self._describe(node),
                numel,
                self._budgets.live_numel,
            )

    def _log_discard(self, param: int) -> None:
        count = self.statistics.discarded_fetches + 1
        if count & (count - 1) == 0:  # At powers of two, so that a model that does it all the time is not flooded.
            logger.info(
                "ZeRO-3: %s was fetched ahead but not used, as the model took another way (%d parameters so far, %d "
                "elements)",
                self.gatherer.names[param],
                count,
                self.statistics.discarded_numel + self.gatherer.numel[param],
            )


def _reduces(point: Point) -> bool:
    return point in (Point.REDUCE, Point.LAST_REDUCE)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
