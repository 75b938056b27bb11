"""Lines in the log that are wanted once in a process."""

from __future__ import annotations

import functools
import itertools
from typing import Hashable, Iterator


def is_first_time(subject: Hashable) -> bool:
    """Whether this process has not asked about the subject before."""
    return next(_times(subject)) == 0


@functools.cache
def _times(subject: Hashable) -> Iterator[int]:
    return itertools.count()
