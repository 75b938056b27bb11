"""Which files under /dev/shm belong to which process.

A segment has no owner on record, so it is attributed by what is certain: the process noted that it created it, has it
mapped or open, or it carries the process id or the rendezvous port in its name. Segments of other programs are never
touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SEGMENT_DIR = Path("/dev/shm")


def existing() -> frozenset[str]:
    """Names of all segments there are, anybody's."""
    try:
        return frozenset(entry.name for entry in SEGMENT_DIR.iterdir())
    except FileNotFoundError:
        return frozenset()


def held_by(pid: int) -> frozenset[str]:
    """Segments that the process has mapped or open and that still have a name."""
    targets: list[str] = []
    proc = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        # address perms offset dev inode path
        targets += [
            line.split(maxsplit=5)[5] for line in (proc / "maps").read_text().splitlines() if "/dev/shm/" in line
        ]
    with contextlib.suppress(OSError):
        for link in (proc / "fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(str(link.readlink()))
    prefix = f"{SEGMENT_DIR}/"
    return frozenset(t.removeprefix(prefix) for t in targets if t.startswith(prefix)) & existing()


def named_after(tokens: Iterable[int]) -> frozenset[str]:
    """Segments with one of the numbers (process ids, ports) as a word of their name."""
    wanted = {str(token) for token in tokens}
    return frozenset(name for name in existing() if wanted.intersection(re.split(r"[^0-9]+", name)))


def noted_in(path: Path) -> frozenset[str]:
    """Segments that a process noted in ``path`` and that still exist."""
    try:
        return frozenset(path.read_text().splitlines()) & existing()
    except FileNotFoundError:
        return frozenset()


def remove(names: Iterable[str]) -> tuple[str, ...]:
    """Remove the names (a mapping stays valid until it is unmapped) and return those that were there."""
    removed = []
    for name in sorted(names):
        with contextlib.suppress(FileNotFoundError):
            (SEGMENT_DIR / name).unlink()
            removed.append(name)
    return tuple(removed)


def note_creations_in(path: Path) -> None:
    """From now on, append the name of each segment that Python code of this process opens for writing to ``path``.

    Covers ``open``/``os.open`` of a path and ``multiprocessing.shared_memory``. Cannot be undone: audit hooks stay
    for life.
    """
    import _posixshmem

    ledger_fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def note(name: str) -> None:
        os.write(ledger_fd, f"{name}\n".encode())

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[0].startswith("/dev/shm/"):
            flags = args[2]
            if isinstance(flags, int) and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                note(args[0].removeprefix("/dev/shm/"))

    sys.addaudithook(audit)

    shm_open: Callable[..., int] = _posixshmem.shm_open

    def noting_shm_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            note(path.removeprefix("/"))
        return shm_open(path, flags, mode=mode)

    _posixshmem.shm_open = noting_shm_open
