"""How a distributed run fails, and how that is told: one exception type per kind, with a report of every rank."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

TAIL_LINES = 80


@dataclass(frozen=True)
class RankReport:
    """All that is known about one rank at the end of a failed run."""

    rank: int
    state: str
    """One line: passed, raised, was still running, ended with."""
    traceback_text: str = ""
    stacks: str = ""
    stdout: str = ""
    stderr: str = ""

    def text(self) -> str:
        parts = [f"----- rank {self.rank}: {self.state} -----"]
        for title, body in (
            ("", self.traceback_text),
            ("Python stacks", self.stacks),
            ("stdout", tail(self.stdout)),
            ("stderr", tail(self.stderr)),
        ):
            if body.strip():
                parts.append(f"[{title}]\n{body.rstrip()}" if title else body.rstrip())
        return "\n".join(parts)


class DistributedFailure(Exception):
    """A function did not do its work on every rank."""

    def __init__(self, summary: str, reports: tuple[RankReport, ...]) -> None:
        # Not super(): next in line may be the __init__ of an exception that the ranks raised, see raised_by_ranks.
        Exception.__init__(self, summary)
        self.summary = summary
        self.reports = reports

    def __str__(self) -> str:
        return "\n".join([self.summary, *(report.text() for report in self.reports)])


class RankRaised(DistributedFailure):
    """One or more ranks raised. If all of them raised one type, the failure is of that type as well."""


class RankTimeout(DistributedFailure):
    """Not every rank was done when the time limit expired, and none had raised or died."""


class RankDied(DistributedFailure):
    """The process of a rank ended during the run."""


class PoolBroken(Exception):
    """The pool itself could not be started or kept."""


def raised_by_ranks(
    summary: str, reports: tuple[RankReport, ...], exception_types: list[tuple[tuple[str, str], ...]]
) -> RankRaised:
    """A ``RankRaised`` that is also what the ranks raised, so that ``pytest.raises`` and ``xfail(raises=)`` can tell.

    ``exception_types`` holds one list of ``(module, qualified name)`` for each rank that raised, nearest class first.
    """
    common = [name for name in exception_types[0] if all(name in other for other in exception_types[1:])]
    same_class = all(other[0] == exception_types[0][0] for other in exception_types[1:])
    cause = next((c for c in map(_loaded_class, common) if c is not None), Exception) if same_class else Exception
    if issubclass(RankRaised, cause) or not issubclass(cause, Exception):
        return RankRaised(summary, reports)
    name = f"RankRaised[{cause.__name__}]"
    kind: type[RankRaised] = type(name, (RankRaised, cause), {"__module__": RankRaised.__module__})
    return kind(summary, reports)


def _loaded_class(name: tuple[str, str]) -> type[BaseException] | None:
    module_name, qualname = name
    value: object = sys.modules.get(module_name)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) and issubclass(value, BaseException) else None


def describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    return f"ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"


def tail(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= TAIL_LINES:
        return text
    return "\n".join([f"... {len(lines) - TAIL_LINES} lines left out ...", *lines[-TAIL_LINES:]])
