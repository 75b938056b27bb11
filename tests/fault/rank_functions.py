"""What the harness's own tests let ranks do. Module-level functions, since each rank imports them by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from tests.models import build, zero3_config


class CustomError(Exception):
    """An exception type that only the tests know, and that cannot be pickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.lock = object.__reduce__


def my_rank() -> int:
    return torch.distributed.get_rank()


def wait_for_peers() -> None:
    torch.distributed.barrier()


def add_rank(a: int, *, b: int) -> int:
    return a + b + my_rank()


def rank_given_by_name(rank: int) -> int:
    return rank


def sum_of_ranks() -> float:
    value = torch.tensor([float(my_rank())])
    torch.distributed.all_reduce(value)
    return value.item()


def fail_assertion_on(rank: int, failing_rank: int) -> None:
    print(f"output of rank {rank}")
    sys.stderr.write(f"errors of rank {rank}\n")
    answers = {"expected": 41 + 1}
    if rank == failing_rank:
        assert answers["expected"] == 54
    wait_for_peers()


def raise_custom_error() -> None:
    raise CustomError("from rank", str(my_rank()))


def raise_different_types() -> None:
    if my_rank() == 0:
        raise KeyError("zero")
    raise ZeroDivisionError("one")


def spin_for_ever() -> None:
    while True:
        pass


def hang_on(hanging_rank: int) -> None:
    if my_rank() == hanging_rank:
        spin_for_ever()
    wait_for_peers()


def exit_on(exiting_rank: int, exit_status: int) -> None:
    if my_rank() == exiting_rank:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os._exit(exit_status)
    wait_for_peers()


def kill_on(killed_rank: int, signal_number: int) -> None:
    if my_rank() == killed_rank:
        os.kill(os.getpid(), signal_number)
    wait_for_peers()


def exit_quietly_on(exiting_rank: int) -> str:
    """Only the exiting rank ends; the other needs nothing from it."""
    if my_rank() == exiting_rank:
        os._exit(0)
    return "done"


def leave_segments(name: str) -> None:
    segment = shared_memory.SharedMemory(name=f"{name}-memory-{my_rank()}", create=True, size=64)
    segment.close()
    Path(f"/dev/shm/{name}-file-{my_rank()}").write_bytes(b"left behind")


def leave_segments_and_die(name: str) -> None:
    leave_segments(name)
    wait_for_peers()
    os.kill(os.getpid(), signal.SIGKILL)


def leave_files() -> Path:
    Path("left-in-the-working-directory").write_text("x")
    return Path.cwd()


def leave_changed_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(1234 + my_rank())
    torch.use_deterministic_algorithms(True)
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["RANK"] = "17"
    os.chdir("/")
    deepspeed.utils.groups.mpu = "not None"


def observe_state() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": torch.rand(1).item(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hooks": len(torch.nn.modules.module._global_forward_hooks),
        "environment": os.environ.get("LEFT_BEHIND"),
        "rank": os.environ["RANK"],
        "in_root": Path.cwd() == Path("/"),
        "mpu": deepspeed.utils.groups.mpu,
        "zero3": is_deepspeed_zero3_enabled(),
        "partitions_at_init": hasattr(torch.nn.Linear(2, 2).weight, "ds_id"),
        "linear": F.linear.__module__,
        "empty_is_patched": torch.empty(1, dtype=torch.float32).device.type,
    }


LIVING: list[object] = []


def leave_zero3_enabled() -> None:
    """Keep an HfDeepSpeedConfig alive and a ``zero.Init`` context open."""
    LIVING.append(HfDeepSpeedConfig(zero3_config()))
    context = deepspeed.zero.Init(config_dict_or_path=zero3_config())
    context.__enter__()
    LIVING.append(context)


def leave_engine() -> None:
    """Make an engine that nobody destroys. It refers to itself, so it is there until it is collected."""
    deepspeed.initialize(model=build("llama"), config=zero3_config())


def leave_collective_unmatched() -> None:
    if my_rank() == 0:
        LIVING.append(torch.distributed.all_reduce(torch.ones(1), async_op=True))


def leave_child_process() -> int:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid


def skip(on_rank: int | None = None) -> None:
    if on_rank in (None, my_rank()):
        pytest.skip("no such thing here")


def xfail() -> None:
    pytest.xfail("not yet")


def skip_without_module() -> None:
    pytest.importorskip("no_such_module_anywhere")


def return_unpicklable() -> object:
    return lambda: None
