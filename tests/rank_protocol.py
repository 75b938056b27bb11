"""What the pytest process and its rank processes say to each other.

Every message is a frozen dataclass sent through a ``multiprocessing`` connection. Values that belong to a test
(arguments, return values) travel as bytes that were pickled separately, so that a value that cannot be restored is
reported as that test's failure and does not break the connection.

The conversation with one rank, in order::

    pytest process                rank
                       <-         StoreReady          rank 0 only
    JoinGroup          ->
                       <-         RankReady
    RunTask            ->
                       <-         TaskEnded
    CleanUp            ->         (only once every rank has sent TaskEnded)
                       <-         CleanedUp
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankSpec:
    """Who a freshly forked process is."""

    rank: int
    world_size: int
    scratch_dir: Path
    """Folder of this rank alone: working directory, temporary files, output, stacks."""
    sys_path: tuple[str, ...]
    """``sys.path`` of the pytest process, so that both import the same test modules."""

    @property
    def stdout_path(self) -> Path:
        return self.scratch_dir / "stdout"

    @property
    def stderr_path(self) -> Path:
        return self.scratch_dir / "stderr"

    @property
    def stacks_path(self) -> Path:
        """Where the rank writes the Python stacks of its threads when it gets ``STACK_SIGNAL``."""
        return self.scratch_dir / "stacks"

    @property
    def segments_path(self) -> Path:
        """Where the rank notes each shared-memory segment that it creates, at once, so that the note outlives it."""
        return self.scratch_dir / "segments"

    @property
    def work_dir(self) -> Path:
        """Working directory and ``TMPDIR`` of the rank; emptied after every test."""
        return self.scratch_dir / "work"


@dataclass(frozen=True)
class StoreReady:
    """Rank 0 listens: ``port`` was chosen by the kernel, so no other process can hold it."""

    port: int


@dataclass(frozen=True)
class JoinGroup:
    port: int


@dataclass(frozen=True)
class RankReady:
    """The rank is a member of the default process group and waits for a task."""


@dataclass(frozen=True)
class FunctionRef:
    """A module-level function, by name, so that each rank imports it for itself."""

    module: str
    name: str


@dataclass(frozen=True)
class RunTask:
    sequence: int
    """Number of the task in this pool; the ranks compare it when they clean up."""
    function: FunctionRef
    payload: bytes
    """Pickled ``(args, kwargs)``."""
    seed: int


class Verdict(enum.Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"


@dataclass(frozen=True)
class TaskEnded:
    sequence: int
    verdict: Verdict
    wall_s: float
    value: bytes = b""
    """Pickled return value of a passed task."""
    message: str = ""
    """The exception's own text, or the reason of a skip."""
    traceback_text: str = ""
    exception_types: tuple[tuple[str, str], ...] = ()
    """``(module, qualified name)`` of the exception's class and its bases, nearest first."""


@dataclass(frozen=True)
class CleanUp:
    sequence: int


@dataclass(frozen=True)
class CleanedUp:
    sequence: int
    residue: tuple[str, ...]
    """What could not be undone; a rank with any is not used again."""
    removed_segments: tuple[str, ...]
    """Shared-memory segments that the task had left behind."""
    destroyed_engines: int


Request = JoinGroup | RunTask | CleanUp
Reply = StoreReady | RankReady | TaskEnded | CleanedUp
