"""Pools of living rank processes, seen from the pytest process.

``RankPool.run`` calls one function on every rank and returns what each returned, or raises what is told in
``rank_failures``. A pool that may not be in a known state afterwards is ended; ``RankPools`` starts another one when
it is next asked for one of that size.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests import shared_segments
from tests.rank_failures import (
    DistributedFailure,
    PoolBroken,
    RankDied,
    RankReport,
    RankTimeout,
    describe_exit,
    raised_by_ranks,
    tail,
)
from tests.rank_protocol import (
    CleanedUp,
    CleanUp,
    FunctionRef,
    JoinGroup,
    RankReady,
    RankSpec,
    RunTask,
    StoreReady,
    TaskEnded,
    Verdict,
)
from tests.rank_template import MAX_MESSAGE_BYTES, Ended, Forked, TemplateReady

DEFAULT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 300.0
"""The first start on a machine compiles DeepSpeed's communication op."""
PEER_GRACE_S = 3.0
"""After a rank raised: how long the others, who may be waiting for it in a collective, get to finish."""
DEATH_GRACE_S = 0.5
"""After a rank died: how long the others get to report what they know."""
CLEAN_UP_TIMEOUT_S = 10.0
END_TIMEOUT_S = 10.0
STACK_DUMP_TIMEOUT_S = 2.0
STACK_SIGNAL = signal.SIGUSR1
_REPOSITORY_DIR = Path(__file__).resolve().parent.parent
_POLL_INTERVAL_S = 0.01
_Reply = TypeVar("_Reply")


class PoolReplaced(UserWarning):
    """A test passed, but left the ranks in a state in which they cannot be used again."""


class TemplateSilent(PoolBroken):
    """The template process did not say in time what was expected of it."""


@dataclass(frozen=True)
class RankExit:
    """Stands for the result of a rank whose end was part of the test (``mortal_ranks``)."""

    exit_code: int


class TemplateProcess:
    """The process that ranks are forked from, and the only one that learns how they ended."""

    def __init__(self, scratch_dir: Path) -> None:
        self._stderr_path = scratch_dir / "template.stderr"
        self._control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._exit_codes: dict[int, int] = {}
        self._forked: list[int] = []
        self._ready = False
        with self._stderr_path.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(_REPOSITORY_DIR / "tests" / "rank_template.py"), str(far_end.fileno())],
                pass_fds=[far_end.fileno()],
                cwd=scratch_dir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        far_end.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def control(self) -> socket.socket:
        """Readable when the template has something to say."""
        return self._control

    def fork(self, spec: RankSpec) -> tuple[int, Connection[Any, Any]]:
        """Fork a rank; return its process id and a connection to it."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._ready:
            self._receive_one(deadline_s)
        near_end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with far_end:
            socket.send_fds(self._control, [pickle.dumps(spec)], [far_end.fileno()])
        while not self._forked:
            self._receive_one(deadline_s)
        return self._forked.pop(), Connection(near_end.detach())

    def exit_code(self, pid: int) -> int | None:
        """How the rank ended, or None if it had not when the template last spoke."""
        self.receive()
        return self._exit_codes.get(pid)

    def wait_for_exit(self, pid: int, timeout_s: float) -> int | None:
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(TemplateSilent):
            while pid not in self._exit_codes:
                self._receive_one(deadline_s)
        return self._exit_codes.get(pid)

    def receive(self) -> None:
        """Take in what the template has said so far."""
        while wait([self._control], 0):
            self._receive_one(time.monotonic())

    def end(self) -> None:
        self._control.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive_one(self, deadline_s: float) -> None:
        if not wait([self._control], max(0.0, deadline_s - time.monotonic())):
            raise TemplateSilent(f"the template process said nothing in time; its output:\n{self._output()}")
        message = self._control.recv(MAX_MESSAGE_BYTES)
        if not message:
            raise PoolBroken(f"the template process ended; its output:\n{self._output()}")
        event = pickle.loads(message)
        if isinstance(event, Ended):
            self._exit_codes[event.pid] = event.exit_code
        elif isinstance(event, Forked):
            self._forked.append(event.pid)
        elif isinstance(event, TemplateReady):
            self._ready = True

    def _output(self) -> str:
        return tail(self._stderr_path.read_text(errors="replace"))


@dataclass
class Rank:
    """One living rank process."""

    spec: RankSpec
    pid: int
    connection: Connection[Any, Any]
    _offsets: dict[Path, int] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.spec.rank

    def mark_output(self) -> None:
        """Output from here on belongs to the next task."""
        for path in (self.spec.stdout_path, self.spec.stderr_path, self.spec.stacks_path):
            self._offsets[path] = path.stat().st_size if path.exists() else 0

    def output(self, path: Path) -> str:
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            return file.read().decode(errors="replace")

    def request_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)

    def stacks(self, deadline_s: float) -> str:
        """Wait for the dump that was requested to be complete. The main thread's stack comes last in it."""
        while True:
            text = self.output(self.spec.stacks_path)
            last_line = text.rstrip().rpartition("\n")[2]
            if ("rank_template.py" in last_line and "<module>" in last_line) or last_line == "  ...":
                return text
            # The dump is written by a signal handler, which cannot tell anyone: the file has to be looked at again.
            if time.monotonic() > deadline_s:
                return text or "(the process did not answer the request for its stacks)"
            time.sleep(_POLL_INTERVAL_S)


@dataclass
class RunState:
    """What has happened so far in one run."""

    ended: dict[int, TaskEnded] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks whose process ended during the run."""

    def failed_ranks(self) -> list[int]:
        return sorted(r for r, end in self.ended.items() if end.verdict is Verdict.FAILED)


class RankPool:
    """A fixed number of rank processes that share a gloo process group."""

    def __init__(self, template: TemplateProcess, world_size: int) -> None:
        self.world_size = world_size
        self.port = 0
        """On which the ranks' store listens; ``MASTER_PORT`` in each rank."""
        self.foreign_segments = shared_segments.existing()
        """What was there before this pool, and so is not its own, whatever it is called."""
        self.last_clean_up: tuple[CleanedUp, ...] = ()
        self._template = template
        self._sequence = 0
        self._scratch_dir = Path(tempfile.mkdtemp(prefix=f"ranks{world_size}-"))
        self._ranks: list[Rank] = []
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        """Whether every rank is there, as far as the template has said."""
        try:
            return bool(self._ranks) and all(self._template.exit_code(rank.pid) is None for rank in self._ranks)
        except PoolBroken:
            return False

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._ranks)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        mortal_ranks: Iterable[int] = (),
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a module-level function on every rank; return what each returned, in rank order.

        Raises a ``DistributedFailure`` with a report of every rank; ``pytest.skip`` and ``pytest.xfail`` on all ranks
        are passed on. Ranks in ``mortal_ranks`` may end their process: their result is then a ``RankExit``.
        """
        if not self.alive:
            raise PoolBroken(f"the pool of {self.world_size} ranks has been ended; ask RankPools for a new one")
        task = self._make_task(function, args, kwargs, seed)
        mortal = frozenset(mortal_ranks)
        try:
            for rank in self._ranks:
                rank.mark_output()
                # A rank that died unnoticed is found out when its end is collected.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    rank.connection.send(task)
            state = self._collect(mortal, timeout_s)
            failure = self._judge(state, mortal, timeout_s)
        except BaseException:
            self.end()
            raise
        if len(state.ended) == self.world_size:
            self._clean_up()
        else:
            self.end()
        if failure is not None:
            raise failure
        self._pass_on_skips(state)
        return [
            pickle.loads(state.ended[r].value) if r in state.ended else RankExit(state.exits[r])
            for r in range(self.world_size)
        ]

    def end(self) -> None:
        """End the ranks, and whatever they started, and remove what they left. Nothing else is touched."""
        ranks, self._ranks = self._ranks, []
        segments = set(shared_segments.named_after([*(rank.pid for rank in ranks), self.port]))
        for rank in ranks:
            segments |= shared_segments.held_by(rank.pid) | shared_segments.noted_in(rank.spec.segments_path)
            rank.connection.close()
            # The rank is the leader of its own session, so this reaches its children as well.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            # Unless it had no time to become one. A process id is the rank's own until the template has told its end.
            with contextlib.suppress(ProcessLookupError, PoolBroken):
                if self._template.exit_code(rank.pid) is None:
                    os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks:
            with contextlib.suppress(PoolBroken):
                self._template.wait_for_exit(rank.pid, END_TIMEOUT_S)
        shared_segments.remove(segments - self.foreign_segments)
        shutil.rmtree(self._scratch_dir, ignore_errors=True)

    def _start(self) -> None:
        sys_path = tuple(str(Path(entry).resolve()) for entry in sys.path)
        for number in range(self.world_size):
            spec = RankSpec(number, self.world_size, self._scratch_dir / f"rank{number}", sys_path)
            pid, connection = self._template.fork(spec)
            self._ranks.append(Rank(spec, pid, connection))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        store = self._receive(self._ranks[0], StoreReady, deadline_s)
        self.port = store.port
        for rank in self._ranks:
            rank.connection.send(JoinGroup(store.port))
        for rank in self._ranks:
            self._receive(rank, RankReady, deadline_s)

    def _receive(self, rank: Rank, expected: type[_Reply], deadline_s: float) -> _Reply:
        try:
            if rank.connection.poll(max(0.0, deadline_s - time.monotonic())):
                reply = rank.connection.recv()
                if isinstance(reply, expected):
                    return reply
                what = f"it sent {reply!r}"
            else:
                what = "it said nothing in time"
        except (EOFError, ConnectionResetError):
            exit_code = self._template.wait_for_exit(rank.pid, END_TIMEOUT_S)
            what = "its connection is closed" if exit_code is None else f"it {describe_exit(exit_code)}"
        raise PoolBroken(
            f"expected {expected.__name__} from rank {rank.number} of {self.world_size}, but {what}; its stderr:\n"
            f"{tail(rank.output(rank.spec.stderr_path))}"
        )

    def _make_task(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], seed: int) -> RunTask:
        name = function.__qualname__
        module = inspect.getmodule(function)
        if module is None or getattr(module, name, None) is not function:
            raise ValueError(
                f"{name} cannot be run on ranks: each rank imports it by name, so it must be a function "
                "at the top level of an importable module, and not be wrapped"
            )
        try:
            payload = pickle.dumps((args, kwargs))
        except Exception as error:
            raise ValueError(
                f"the arguments of {name} cannot be sent to the ranks ({error}): expected values that pickle "
                f"can handle, got {[type(value).__name__ for value in (*args, *kwargs.values())]}"
            ) from error
        self._sequence += 1
        return RunTask(self._sequence, FunctionRef(module.__name__, name), payload, seed)

    def _collect(self, mortal: frozenset[int], timeout_s: float) -> RunState:
        """Wait until every rank has ended its task, or nothing more is to be expected."""
        state = RunState()
        started_s = time.monotonic()
        deadline_s = started_s + timeout_s
        pending = {rank.number: rank for rank in self._ranks}
        while pending:
            connections = {rank.connection: rank for rank in pending.values()}
            readable = wait([*connections, self._template.control], max(0.0, deadline_s - time.monotonic()))
            if not readable:
                return state
            self._template.receive()
            for connection, rank in connections.items():
                if connection in readable:
                    self._take_reply(rank, state, pending)
            for rank in list(pending.values()):
                exit_code = self._template.exit_code(rank.pid)
                if exit_code is not None and not rank.connection.poll():
                    state.exits[rank.number] = exit_code
                    del pending[rank.number]
            if set(state.exits) - mortal:
                deadline_s = min(deadline_s, time.monotonic() + DEATH_GRACE_S)
            elif state.failed_ranks():
                deadline_s = min(deadline_s, time.monotonic() + PEER_GRACE_S)
        return state

    def _take_reply(self, rank: Rank, state: RunState, pending: dict[int, Rank]) -> None:
        try:
            reply = rank.connection.recv()
        except (EOFError, ConnectionResetError):
            exit_code = self._template.wait_for_exit(rank.pid, END_TIMEOUT_S)
            if exit_code is None:
                raise PoolBroken(
                    f"rank {rank.number} closed its connection, but its process {rank.pid} lives"
                ) from None
            state.exits[rank.number] = exit_code
        else:
            if not isinstance(reply, TaskEnded) or reply.sequence != self._sequence:
                raise PoolBroken(f"expected the end of task {self._sequence} from rank {rank.number}, got {reply!r}")
            state.ended[rank.number] = reply
        del pending[rank.number]

    def _judge(self, state: RunState, mortal: frozenset[int], timeout_s: float) -> DistributedFailure | None:
        """The failure that the run amounts to. A death explains what the others raised; a raise explains who still
        waits."""
        running = [r for r in self._ranks if r.number not in state.ended and r.number not in state.exits]
        dead = sorted(set(state.exits) - mortal)
        failed = state.failed_ranks()
        verdicts = {end.verdict for end in state.ended.values()}
        if not (running or dead or failed):
            if len(verdicts) <= 1:
                return None
            told = ", ".join(f"rank {r} {end.verdict.value}" for r, end in sorted(state.ended.items()))
            return raised_by_ranks(
                f"the ranks disagree ({told}): skip or xfail on every rank or on none", self._reports(state), [()]
            )
        reports = self._reports(state)
        if dead:
            told = ", ".join(f"rank {r} {describe_exit(state.exits[r])}" for r in dead)
            return RankDied(f"{told} during the run on {self.world_size} ranks", reports)
        if failed:
            told = ", ".join(str(r) for r in failed)
            return raised_by_ranks(
                f"rank {told} of {self.world_size} raised", reports, [state.ended[r].exception_types for r in failed]
            )
        told = ", ".join(str(rank.number) for rank in running)
        return RankTimeout(f"rank {told} of {self.world_size} did not finish within {timeout_s:g} s", reports)

    def _reports(self, state: RunState) -> tuple[RankReport, ...]:
        running = [r for r in self._ranks if r.number not in state.ended and r.number not in state.exits]
        for rank in running:
            rank.request_stacks()
        deadline_s = time.monotonic() + STACK_DUMP_TIMEOUT_S
        stacks = {rank.number: rank.stacks(deadline_s) for rank in running}
        return tuple(self._report(rank, state, stacks.get(rank.number, "")) for rank in self._ranks)

    def _report(self, rank: Rank, state: RunState, stacks: str) -> RankReport:
        end = state.ended.get(rank.number)
        if end is not None:
            described = f"{'raised' if end.verdict is Verdict.FAILED else end.verdict.value} after {end.wall_s:.2f} s"
        elif rank.number in state.exits:
            described = describe_exit(state.exits[rank.number])
        else:
            described = "was still running"
        return RankReport(
            rank.number,
            described,
            traceback_text=end.traceback_text if end is not None else "",
            stacks=stacks,
            stdout=rank.output(rank.spec.stdout_path),
            stderr=rank.output(rank.spec.stderr_path),
        )

    def _pass_on_skips(self, state: RunState) -> None:
        import pytest

        end = next(iter(state.ended.values()), None)
        if end is not None and end.verdict is Verdict.SKIPPED:
            pytest.skip(end.message)
        if end is not None and end.verdict is Verdict.XFAILED:
            pytest.xfail(end.message)

    def _clean_up(self) -> None:
        """Have every rank put its state back; end the pool if one cannot."""
        deadline_s = time.monotonic() + CLEAN_UP_TIMEOUT_S
        try:
            for rank in self._ranks:
                rank.connection.send(CleanUp(self._sequence))
            self.last_clean_up = tuple(self._receive(rank, CleanedUp, deadline_s) for rank in self._ranks)
        except (PoolBroken, OSError) as error:
            problems = [str(error)]
        else:
            problems = [f"rank {n}: {line}" for n, reply in enumerate(self.last_clean_up) for line in reply.residue]
        if problems:
            self.end()
            warnings.warn(PoolReplaced("\n".join(["the ranks are replaced:", *problems])), stacklevel=3)


class RankPools:
    """The pools of one pytest session, by world size. Nothing is started before it is needed."""

    def __init__(self) -> None:
        self._scratch_dir: Path | None = None
        self._template: TemplateProcess | None = None
        self._pools: dict[int, RankPool] = {}

    def __enter__(self) -> RankPools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __getitem__(self, world_size: int) -> RankPool:
        """A pool that is ready to run a task."""
        pool = self._pools.get(world_size)
        if pool is not None and not pool.alive:
            pool.end()
            pool = None
        if pool is None:
            pool = self._pools[world_size] = RankPool(self.start_template(), world_size)
        return pool

    def start_template(self) -> TemplateProcess:
        """Begin the slow imports, if they are not done, without waiting for them."""
        if self._template is not None and not self._template.alive:
            self._end_processes()
        if self._template is None:
            if self._scratch_dir is None:
                self._scratch_dir = Path(tempfile.mkdtemp(prefix="rank-template-"))
            self._template = TemplateProcess(self._scratch_dir)
        return self._template

    def end(self) -> None:
        """End all processes. Another pool can still be asked for."""
        self._end_processes()
        if self._scratch_dir is not None:
            shutil.rmtree(self._scratch_dir, ignore_errors=True)
            self._scratch_dir = None

    def _end_processes(self) -> None:
        for pool in self._pools.values():
            pool.end()
        self._pools.clear()
        if self._template is not None:
            self._template.end()
            self._template = None
