"""What runs inside a rank: join the group once, then run one task after another and put everything back in between."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests import shared_segments
from tests.rank_imports import rewrite_assertions_of_tests
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
from tests.rank_state import RankState, listening_ports, residue, seed_everything

STACK_SIGNAL = signal.SIGUSR1
LOCALHOST = "127.0.0.1"


def run_rank(spec: RankSpec, connection_fd: int) -> NoReturn:
    """Serve the pytest process until it closes the connection."""
    connection: Connection[Any, Any] = Connection(connection_fd)
    isolate(spec)
    join_group(spec, connection)
    state = RankState.capture()
    ports = listening_ports()
    connection.send(RankReady())
    while True:
        try:
            request = connection.recv()
        except EOFError:
            # Nothing in this process is worth an orderly exit, and atexit handlers may wait for ranks that are gone.
            os._exit(0)
        if isinstance(request, RunTask):
            connection.send(run_task(request))
        elif isinstance(request, CleanUp):
            connection.send(clean_up(request, spec, state, ports))


def isolate(spec: RankSpec) -> None:
    """Give this process its own session, folder, output files and stack dump."""
    os.setsid()
    spec.work_dir.mkdir(parents=True)
    os.chdir(spec.work_dir)
    os.environ["TMPDIR"] = str(spec.work_dir)
    tempfile.tempdir = None
    for fd, path in ((1, spec.stdout_path), (2, spec.stderr_path)):
        file_fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.dup2(file_fd, fd)
        os.close(file_fd)
    # The files stay open for the life of the process: the handlers write to their descriptors.
    stacks_fd = os.open(spec.stacks_path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACK_SIGNAL, file=stacks_fd, all_threads=True)
    faulthandler.enable(file=2, all_threads=True)
    sys.path[:] = spec.sys_path
    rewrite_assertions_of_tests()
    shared_segments.note_creations_in(spec.segments_path)


def join_group(spec: RankSpec, connection: Connection[Any, Any]) -> None:
    """Create the default process group and DeepSpeed's backend on it, with the variables that ``deepspeed`` sets."""
    import deepspeed

    if spec.rank == 0:
        # Port 0: the kernel picks a free one, and the store holds it from then on.
        store = torch.distributed.TCPStore(LOCALHOST, 0, spec.world_size, is_master=True, wait_for_workers=False)
        connection.send(StoreReady(store.port))
    request: JoinGroup = connection.recv()
    if spec.rank != 0:
        store = torch.distributed.TCPStore(LOCALHOST, request.port, spec.world_size, is_master=False)
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.world_size),
        CROSS_RANK="0",
        CROSS_SIZE="1",
        MASTER_ADDR=LOCALHOST,
        MASTER_PORT=str(request.port),
    )
    torch.distributed.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world_size)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.distributed.barrier()
    # The communication op has mapped its segments on every rank by now; without a name nothing can be left behind.
    if spec.rank == 0:
        shared_segments.remove(shared_segments.named_after([request.port]))


def resolve(reference: FunctionRef) -> Any:
    return getattr(importlib.import_module(reference.module), reference.name)


def run_task(task: RunTask) -> TaskEnded:
    """Run the task's function and turn whatever it does into a reply."""
    seed_everything(task.seed)
    started_s = time.monotonic()
    try:
        function = resolve(task.function)
        args, kwargs = pickle.loads(task.payload)
        if "rank" in inspect.signature(function).parameters:
            kwargs["rank"] = torch.distributed.get_rank()
        value = pickle_value(function(*args, **kwargs), task.function.name)
    except BaseException as error:
        ended = describe_end(task.sequence, error, time.monotonic() - started_s)
        # The frames hold the test's engines and models, which have to go.
        traceback.clear_frames(error.__traceback__)
    else:
        ended = TaskEnded(task.sequence, Verdict.PASSED, time.monotonic() - started_s, value)
    sys.stdout.flush()
    sys.stderr.flush()
    return ended


def pickle_value(value: object, function_name: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{function_name} returned a {type(value).__name__}, which cannot be sent to the pytest process ({error}): "
            "return values that pickle can handle"
        ) from error


def describe_end(sequence: int, error: BaseException, wall_s: float) -> TaskEnded:
    if isinstance(error, pytest.skip.Exception):
        return TaskEnded(sequence, Verdict.SKIPPED, wall_s, message=str(error))
    if isinstance(error, pytest.xfail.Exception):
        return TaskEnded(sequence, Verdict.XFAILED, wall_s, message=str(error))
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # the harness's own frames say nothing about the test
    return TaskEnded(
        sequence,
        Verdict.FAILED,
        wall_s,
        message=str(error),
        traceback_text="".join(traceback.format_exception(type(error), error, frames)),
        exception_types=tuple((c.__module__, c.__qualname__) for c in type(error).__mro__),
    )


def clean_up(request: CleanUp, spec: RankSpec, state: RankState, ports: frozenset[int]) -> CleanedUp:
    """Undo what the task did to this process, and see whether the ranks are still in step."""
    left: list[str] = []
    destroyed = 0
    try:
        destroyed = state.restore()
        check_in_step(request.sequence)
    except Exception:
        left.append("cleaning up failed:\n" + traceback.format_exc())
    left += residue()
    left += [f"port {port} is still listened on" for port in listening_ports() - ports]
    noted = shared_segments.noted_in(spec.segments_path)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(spec.segments_path, 0)
    empty_folder(spec.work_dir)
    return CleanedUp(request.sequence, tuple(left), shared_segments.remove(noted), destroyed)


def check_in_step(sequence: int) -> None:
    """Raise unless every rank comes here for the same task, with as many process groups made.

    A collective that a test started on one rank only is still in the group's queue. It would pair up with one of the
    next test's, so here it pairs up with this gather and the values differ.
    """
    mine = torch.tensor([sequence, torch.distributed.distributed_c10d._world.group_count], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, mine)
    if any(not torch.equal(mine, other) for other in everyone):
        raise RuntimeError(
            "the ranks are out of step: expected the same (task, process groups made) on each, got "
            f"{[tuple(other.tolist()) for other in everyone]}; a collective ran on some ranks only"
        )


def empty_folder(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
