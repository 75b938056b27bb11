"""Timing several workloads by turns, so that a drift of the machine's speed falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved_medians_s(
    workloads: Mapping[str, Callable[[], object]],
    samples: int,
    warm_ups: int,
    line_up: Callable[[], object],
) -> dict[str, float]:
    """Median seconds of each workload over `samples` rounds, after `warm_ups` rounds that are not counted.

    `line_up` is called before each measurement and outside of it: a barrier, so that no rank's measurement holds the
    time that it waited for a rank that came late from the measurement before.
    """
    durations_s: dict[str, list[float]] = {name: [] for name in workloads}
    for round_index in range(warm_ups + samples):
        for name, workload in workloads.items():
            line_up()
            begin_s = time.perf_counter()
            workload()
            duration_s = time.perf_counter() - begin_s
            if round_index >= warm_ups:
                durations_s[name].append(duration_s)
    return {name: statistics.median(values) for name, values in durations_s.items()}
