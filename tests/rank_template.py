"""The process that every rank is forked from.

Importing torch, transformers and deepspeed takes seconds; a fork takes milliseconds. The template therefore imports
them once, stays single-threaded (a fork copies only the calling thread) and forks a rank whenever it is asked to. It
is started as ``python -u rank_template.py FD``, where FD is one end of a ``SOCK_SEQPACKET`` socket pair.

It receives a pickled ``RankSpec`` with the file descriptor of the rank's own connection, and sends ``Forked`` and
``Ended``. Ranks are its children, so it alone can read their exit status. It ends when the pytest process does,
however that ends, and takes the ranks with it.

``multiprocessing``'s fork server does much the same, but before Python 3.13 it ignores ``sys.path`` when it preloads,
hides a failing preload, and outlives a killed parent for as long as a child lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

MAX_MESSAGE_BYTES = 1 << 16
PRELOADED_MODULES = (
    "torch",
    "torch.distributed",
    "pytest",
    "psutil",
    "transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.opt.modeling_opt",
    "transformers.integrations.deepspeed",
    "deepspeed",
    # initialize imports it late, and it takes seconds.
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Set before the first import. One thread per rank: several ranks share few cores, and sums stay in one order."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class TemplateReady:
    pid: int


@dataclass(frozen=True)
class Forked:
    pid: int


@dataclass(frozen=True)
class Ended:
    pid: int
    exit_code: int
    """Negative: the number of the signal that ended the process."""


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, SIGKILL of the parent included (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before the request took effect
            os._exit(1)


def build_communication_op() -> None:
    """Load the op that ``deepspeed.init_distributed`` needs, so that its first build happens once and not in each
    rank."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and builder.is_compatible():
        builder.load(verbose=False)


def run_in_child(message: bytes, connection_fd: int) -> NoReturn:
    """Become a rank. Never returns to the template's loop, whatever goes wrong."""
    import traceback

    try:
        from tests.rank_process import run_rank

        run_rank(pickle.loads(message), connection_fd)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def reap_children(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            control.send(pickle.dumps(Ended(pid, os.waitstatus_to_exitcode(status))))


def serve(control: socket.socket) -> None:
    """Fork ranks until the pytest process closes its end."""
    template_pid = os.getpid()
    wake_read_fd, wake_write_fd = os.pipe()
    os.set_blocking(wake_read_fd, False)
    os.set_blocking(wake_write_fd, False)
    signal.set_wakeup_fd(wake_write_fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([control.fileno(), wake_read_fd], [], [])
        if wake_read_fd in readable:
            os.read(wake_read_fd, MAX_MESSAGE_BYTES)
            reap_children(control)
        if control.fileno() not in readable:
            continue
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(template_pid)
            control.close()
            os.close(wake_read_fd)
            os.close(wake_write_fd)
            run_in_child(message, fds[0])
        os.close(fds[0])
        control.send(pickle.dumps(Forked(pid)))


def main(control_fd: int) -> None:
    die_with_parent(os.getppid())
    control = socket.socket(fileno=control_fd)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    build_communication_op()
    if threading.active_count() != 1:
        raise RuntimeError(
            f"the template must have one thread when it forks, but has {[t.name for t in threading.enumerate()]}: "
            "find the preloaded module that starts a thread when it is imported"
        )
    # What exists now is shared by all ranks and never dies: keep the collector from touching (and so copying) it.
    gc.collect()
    gc.freeze()
    control.send(pickle.dumps(TemplateReady(os.getpid())))
    serve(control)


if __name__ == "__main__":
    # Messages are pickled by module name; this file must therefore be one module, not two.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests import rank_template

    rank_template.main(int(sys.argv[1]))
