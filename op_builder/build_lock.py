"""One builder at a time for each op that is compiled at first use, and no waiting for a builder that is dead.

torch guards an op's build directory with a file named `lock` that exists while a build runs. A build that was killed
leaves the file, and every later process waits for it to vanish, in silence and for ever. Here the kernel keeps the
lock (flock), and gives it up with the process that held it, however that ends. Whoever holds it knows that a `lock`
file which no process has open is a leftover.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import Iterator, Optional

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

logger = logging.getLogger("DeepSpeed")


@contextlib.contextmanager
def build_lock(op_name: str, directory: Path) -> Iterator[None]:
    """Hold the build directory of an op. Waits for a living builder, with one line that names its process.

    Where the file system cannot lock (some network mounts) nothing is held and torch's own file is all there is.
    """
    if fcntl is None:
        yield
        return
    with (directory / "deepspeed_build_lock").open("a+", encoding="utf-8") as file:
        if _acquire(file, op_name):
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            _take_over(directory / "lock", op_name)
        yield


def _acquire(file, op_name: str) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        logger.warning("op %s is being built by process %s; waiting for it", op_name, file.read().strip() or "?")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _take_over(lock: Path, op_name: str) -> None:
    """Remove torch's lock file if it is a leftover. A build by a process that does not flock is left to finish."""
    if not lock.exists():
        return
    holder = process_that_has_open(lock)
    if holder is None:
        lock.unlink(missing_ok=True)
        logger.warning("a killed build of op %s left %s; removed it and building anew", op_name, lock)
    else:
        logger.warning("op %s is being built by process %s; waiting for it", op_name, holder)


def process_that_has_open(path: Path) -> Optional[int]:
    """The id of a process that has this file open, or None. Processes of other users are not looked into."""
    import psutil

    wanted = os.path.realpath(path)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(file.path == wanted for file in process.open_files()):
                return process.pid
    return None
