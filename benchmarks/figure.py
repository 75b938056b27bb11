"""The measured value: what it is called, its unit, which way is better and what it should reach."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

TIMES_PLAIN = "× plain"
"""Unit of a figure that is a ratio to plain torch in the same process; such figures make up the chart."""


class Better(str, enum.Enum):
    """The direction in which a figure improves."""

    LOWER = "lower"
    HIGHER = "higher"

    def worst(self, values: list[float]) -> float:
        """The value of the rank that holds the others up."""
        return max(values) if self is Better.LOWER else min(values)


@dataclass(frozen=True)
class Aim:
    """The limit that a figure should keep to, with a note on the circumstances where the limit needs one."""

    limit: float
    note: str = ""

    def is_met(self, value: float, better: Better) -> bool:
        return value <= self.limit if better is Better.LOWER else value >= self.limit


@dataclass(frozen=True)
class Figure:
    """One value that one rank measured in one run."""

    name: str
    value: float
    unit: str
    better: Better = Better.LOWER
    aim: Aim | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Figure:
        aim = record["aim"]
        return Figure(
            name=record["name"],
            value=float(record["value"]),
            unit=record["unit"],
            better=Better(record["better"]),
            aim=None if aim is None else Aim(**aim),
        )
