"""What each environment does once before anything is measured: build its ops and read its files into memory."""

from __future__ import annotations

from benchmarks.case import Case, Rank
from benchmarks.figure import Figure


def measure(rank: Rank) -> list[Figure]:
    """Joins a process group, at which DeepSpeed compiles its shared-memory op where it has not yet."""
    from benchmarks import workload

    with workload.process_group():
        return []


CASE = Case(title="warm-up", measure=measure, world_sizes=(2,), time_limit_s=600.0)
