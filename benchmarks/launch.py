"""Running one case once: N rank processes of one environment, a time limit, and what they reported."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from benchmarks.environment import Environment
from benchmarks.figure import Figure

RANK_SCRIPT = Path(__file__).with_name("rank.py")
ADDRESS = "127.0.0.1"
GRACE_S = 10.0
"""How long the other ranks may go on after one has failed, and how long a rank may take to write its stacks."""
LOG_TAIL_LINES = 40


@dataclass(frozen=True)
class Order:
    """What to run: the `CASE` of `module`, on `world_size` ranks of an environment."""

    environment: Environment
    module: str
    world_size: int
    time_limit_s: float
    quick: bool


@dataclass(frozen=True)
class Outcome:
    """What came of an order: figures of every rank, or a reason in one line and the ranks' output for the terminal."""

    wall_s: float
    figures: tuple[tuple[Figure, ...], ...]
    """By rank; empty after a failure."""
    failure: str | None = None
    detail: str = ""


@dataclass
class _RankProcess:
    """A rank process with the files that it writes and a descriptor that becomes readable when it ends."""

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    result: Path
    log: Path
    end_time_s: float = math.inf
    ended_by_us: bool = False

    def report(self) -> dict[str, Any]:
        """What the rank wrote at its end."""
        return json.loads(self.result.read_text()) if self.result.exists() else {"failure": None, "figures": []}

    def exit_status(self) -> int | None:
        """As `Popen.poll`, but without reaping: until somebody does, the id of the rank's group stays its own."""
        state = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def complaint(self) -> str | None:
        """Why this rank has no figures, or nothing where it has them."""
        status = self.process.returncode
        if self.ended_by_us:
            return "was still running and has been ended"
        if failure := self.report()["failure"]:
            return failure
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        if status > 0 or not self.result.exists():
            return f"exit status {status} without a result"
        return None

    def end(self, first: signal.Signals) -> None:
        """Ends the rank's whole process group: `first` gets a moment to work, then it is killed."""
        self.ended_by_us = self.exit_status() is None
        if self.ended_by_us:
            self.process.send_signal(first)
            wait([self.pidfd], GRACE_S)
        # A rank leads its own group, which may outlive it: a compiler, or a child that measures memory.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.pidfd)


def launch(order: Order) -> Outcome:
    """Runs an order to its end; every process that it started is gone when it returns or raises."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        port = _free_port()
        ranks: list[_RankProcess] = []
        try:
            for rank in range(order.world_size):
                ranks.append(_start(order, rank, port, Path(folder)))
            timed_out = not _await_ranks(ranks, begin_s + order.time_limit_s)
        finally:
            for rank_process in ranks:
                rank_process.end(first=signal.SIGABRT)
            _remove_shared_segments(port)
        wall_s = time.monotonic() - begin_s
        complaints = {rank.rank: text for rank in ranks if (text := rank.complaint()) is not None}
        if complaints:
            failure = f"no end after {order.time_limit_s:.0f} s" if timed_out else _cause(ranks, complaints)
            return Outcome(wall_s, (), _one_line(failure), _detail(ranks, complaints))
        figures = tuple(tuple(Figure.from_json(figure) for figure in rank.report()["figures"]) for rank in ranks)
        return Outcome(wall_s, figures)


def _start(order: Order, rank: int, port: int, folder: Path) -> _RankProcess:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    result = folder / f"rank{rank}.json"
    log = folder / f"rank{rank}.log"
    variables = order.environment.variables() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_SIZE": str(order.world_size),
        "LOCAL_WORLD_SIZE": str(order.world_size),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
    }
    command: list[str | Path] = [order.environment.interpreter, RANK_SCRIPT, "--module", order.module]
    command += ["--result", result, "--scratch", scratch, "--time-limit-s", str(order.time_limit_s)]
    if order.quick:
        command.append("--quick")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _RankProcess(rank, process, os.pidfd_open(process.pid), result, log)


def _await_ranks(ranks: list[_RankProcess], deadline_s: float) -> bool:
    """Waits until all ranks have ended, but not past the deadline, nor long once a rank has failed.

    Returns whether the deadline was kept, failures or not.
    """
    running = {rank.pidfd: rank for rank in ranks}
    failed = False
    while running:
        ready = wait(list(running), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return failed
        for pidfd in ready:
            rank = running.pop(cast(int, pidfd))
            rank.end_time_s = time.monotonic()
            if rank.exit_status() != 0 and not failed:
                failed = True
                deadline_s = min(deadline_s, rank.end_time_s + GRACE_S)
    return True


def _cause(ranks: list[_RankProcess], complaints: dict[int, str]) -> str:
    """The complaint of the rank that failed first: those of the others mostly say that it was gone."""
    first = min((rank for rank in ranks if rank.rank in complaints), key=lambda rank: rank.end_time_s)
    return f"rank {first.rank}: {complaints[first.rank]}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


def _remove_shared_segments(port: int) -> None:
    """Removes the shared-memory segments of this run's group, which DeepSpeed leaves; their names hold the port."""
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_{ADDRESS}_{port}_*"):
        segment.unlink(missing_ok=True)


def _one_line(text: str, limit: int = 200) -> str:
    """The text with its line breaks and runs of blanks made single blanks, cut to `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _detail(ranks: list[_RankProcess], complaints: dict[int, str]) -> str:
    """For the terminal: what is wrong with each rank, and the end of what each has written."""
    parts = [f"rank {rank}: {text}" for rank, text in complaints.items()]
    for rank in ranks:
        tail = rank.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        parts += [f"--- last output of rank {rank.rank}", *tail]
    return "\n".join(parts)
