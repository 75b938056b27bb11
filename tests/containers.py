"""What models put tensors into: containers that hooks have to see into, and how to pack and unpack them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Output:
    hidden: torch.Tensor
    note: str = "kept"


@dataclass(frozen=True)
class FrozenOutput:
    hidden: torch.Tensor


@dataclass(slots=True)
class SlottedOutput:
    hidden: torch.Tensor


class PlainObject:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class SlottedObject:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


NamedOutput = namedtuple("NamedOutput", ["hidden"])


@dataclass(frozen=True)
class Container:
    """How a block packs its output, and how the next one takes it out again."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


def by_attribute(kind: Callable[[torch.Tensor], Any]) -> Container:
    return Container(kind, lambda value: value.hidden)
