"""One builder at a time for each op that is compiled at first use, and no waiting for a builder that is dead.

torch guards an op's build directory with a file named `lock` that exists while a build runs. A build that was killed
leaves the file, and every later process waits for it to vanish, in silence and for ever. Here the kernel keeps the
lock (flock), and gives it up with the process that held it, however that ends. Whoever holds it knows that a `lock`
file which no process has open is a leftover.
"""

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Iterator, Optional

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

# Loading an op that is compiled takes the lock for a moment. Waiting longer than this is worth a line.
SILENT_WAIT_S = 2.0
_POLL_INTERVAL_S = 0.05

logger = logging.getLogger("DeepSpeed")


@contextlib.contextmanager
def build_lock(op_name: str, directory: Path) -> Iterator[None]:
    """Hold the build directory of an op. Waits for a living builder, with one line that names its host and process.

    Where the lock file cannot be opened or the file system cannot lock, nothing is held and torch's own file is all
    there is, as without this module.
    """
    descriptor = _open(directory.with_name(f"{directory.name}.deepspeed_lock"))
    try:
        held = descriptor is not None and _acquire(descriptor, op_name)
        if held and not _built_elsewhere(directory, op_name, _holder(descriptor)):
            # Padded, so that a reader never sees an empty file or the tail of a longer entry.
            os.pwrite(descriptor, f"{socket.gethostname()}:{os.getpid()}".ljust(300).encode(), 0)
            _take_over(directory, op_name)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(path: Path) -> Optional[int]:
    if fcntl is None:
        return None
    try:
        # For everybody whom the umask lets: an extensions directory may be shared by a group.
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _acquire(descriptor: int, op_name: str) -> bool:
    patience_until_s = time.monotonic() + SILENT_WAIT_S
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if told else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            if time.monotonic() > patience_until_s:
                logger.warning("op %s is being built by process %s; waiting for it", op_name, _holder(descriptor))
                told = True
            else:
                time.sleep(_POLL_INTERVAL_S)
        except OSError:
            return False


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 300, 0).decode(errors="replace").strip()


def _built_elsewhere(directory: Path, op_name: str, last_holder: str) -> bool:
    """Whether torch's lock may be that of another host, whose processes cannot be seen from here.

    The entry of that host has to stay as it is until its build is over: the next process decides by it too.
    """
    lock = directory / "lock"
    if last_holder.partition(":")[0] in ("", socket.gethostname()) or not lock.exists():
        return False
    logger.warning(
        "op %s is being built by process %s; if that build was killed, remove %s", op_name, last_holder, lock
    )
    return True


def _take_over(directory: Path, op_name: str) -> None:
    """Begin anew where a build was killed. A build by a process that does not flock is left to finish."""
    lock = directory / "lock"
    if not lock.exists():
        return
    holder = process_that_has_open(lock)
    if holder is not None:
        logger.warning("op %s is being built by process %s; waiting for it", op_name, holder)
        return
    # Compilers outlive a killed build and go on writing to the directory in which they were started. Moved away, it
    # is still theirs, and nothing of it can get into the new build.
    abandoned = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-killed-"))
    directory.replace(abandoned)
    directory.mkdir()
    shutil.rmtree(abandoned, ignore_errors=True)
    logger.warning("a killed build of op %s left %s; removed it and building anew", op_name, lock)


def process_that_has_open(path: Path) -> Optional[int]:
    """The id of a process that has this file open, or None. Processes of other users are not looked into."""
    import psutil

    wanted = os.path.realpath(path)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(file.path == wanted for file in process.open_files()):
                return process.pid
    return None
