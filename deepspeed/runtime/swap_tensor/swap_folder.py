"""The folder in which one engine keeps its swap files.

[Note: who owns a swap folder]

Several processes, engines and runs may be given one ``nvme_path``. Each takes a folder of its own there and holds a
shared flock on a file beside it for as long as it lives, however it ends; so does each other rank that reads the files.
Whoever can take the lock of a folder alone knows that nobody needs it any more, and removes it; so files of a run that
was killed go when the next one starts, and those of one that lives are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
import weakref
from pathlib import Path

import psutil
from deepspeed.utils.logging import logger

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
LOCK_SUFFIX = ".lock"


class SwapFolder:
    """A folder below ``parent`` that is this object's alone. It goes with the object, or with the process.

    Args:
        parent: made if it is not there.
        name: what the folder's name begins with.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, parent: Path, name: str) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(parent)
            self.path = parent / f"{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self._held = {self.path: _take_lock(_lock_of(self.path))}
            self.path.mkdir()
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot keep swap files below nvme_path ({error.strerror}): it has to be a folder on a local disk "
                "that this process may write to",
                str(error.filename or parent),
            ) from error
        # Runs when the object is collected and when the interpreter ends; once.
        self._remove = weakref.finalize(self, _let_go_of_all, self._held, os.getpid())
        self.file_system = file_system_of(self.path)
        """Its type, such as ``ext4``; empty if it cannot be told."""
        if self.file_system in MEMORY_FILE_SYSTEMS:
            logger.warning(
                "ZeRO: swap files go to %s, which is a %s: that is host memory, not a disk.",
                self.path,
                self.file_system,
            )

    def keep(self, folder: Path) -> None:
        """Have ``folder``, which is another rank's, stay as long as this one does, whatever becomes of its owner.

        Raises:
            OSError: it is gone already.
        """
        if folder not in self._held:
            self._held[folder] = _take_lock(_lock_of(folder), create=False)

    def remove(self) -> None:
        """Delete the folder with everything in it, unless another rank keeps it: then that one does, as its last.

        Safe to call twice.
        """
        self._remove()

    def free_bytes(self) -> int:
        """What is left on the file system for this process."""
        return shutil.disk_usage(self.path).free


def remove_leftovers(parent: Path) -> list[Path]:
    """Delete the folders whose owners are dead; returns them."""
    removed = []
    for lock_path in sorted(parent.glob(f"*{LOCK_SUFFIX}")):
        folder = lock_path.with_name(lock_path.name.removesuffix(LOCK_SUFFIX))
        if _remove_if_free(folder):
            removed.append(folder)
    if removed:
        logger.info("ZeRO: removed the swap files of %d runs that have ended below %s.", len(removed), parent)
    return removed


def file_system_of(path: Path) -> str:
    """The type of the file system that ``path`` is on, such as ``ext4``; empty if it cannot be told."""
    resolved = path.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if resolved.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK_SUFFIX)


def _take_lock(path: Path, create: bool = True) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # Someone who looked for leftovers may have taken it for one, between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def _remove_if_free(folder: Path) -> bool:
    """Delete ``folder`` if nobody holds its lock; whether that was so."""
    lock_path = _lock_of(folder)
    try:
        descriptor = os.open(lock_path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        lock_path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _let_go_of_all(held: dict[Path, int], owner_pid: int) -> None:
    """``held`` are folders and the descriptors of their locks."""
    for folder, lock in held.items():
        os.close(lock)
        if os.getpid() == owner_pid:  # A process that was forked off shares the locks, but not the files.
            _remove_if_free(folder)
    held.clear()
