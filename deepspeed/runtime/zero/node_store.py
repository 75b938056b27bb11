"""Partitions that every rank of a node can read without their owners' help.

[Note: where partitions lie]

A partition stays what it is for its owner, ``param.ds_tensor``; only its memory is that of a segment which all ranks
have mapped (node_segment.py). In an engine without an optimizer the partitions of a parameter lie side by side, so that
on the host the whole parameter is a view of them. An optimizer wants the partitions of a rank to lie together; there a
parameter is put together by copying.

Who writes to a partition does so between two meetings of all ranks (`Coordinator.agree_on_update`), and nobody who
reads is away from such a meeting: so a reader sees all of an update or nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.node_segment import Counter, NodeSegment

ALIGNMENT_BYTES = 64
"""A cache line; kernels ask for no more."""


@dataclass(frozen=True)
class Shape:
    """What one rank's partition of a parameter is like; the same on all ranks."""

    numel: int
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where the partitions of a parameter are."""

    shape: Shape
    offset_bytes: int
    """Of rank 0's partition."""
    stride_bytes: int
    """From one rank's partition to the next one's."""

    @property
    def is_side_by_side(self) -> bool:
        return self.stride_bytes == self.shape.n_bytes


@dataclass(frozen=True)
class Layout:
    """A place for each parameter, by number."""

    places: Mapping[int, Place]
    n_bytes: int


def lay_side_by_side(shapes: Mapping[int, Shape], ranks: int) -> Layout:
    """All partitions of a parameter one after the other."""
    places: dict[int, Place] = {}
    offset = 0
    for number, shape in shapes.items():
        places[number] = Place(shape, offset, shape.n_bytes)
        offset = _aligned(offset + ranks * shape.n_bytes)
    return Layout(places, offset)


def lay_by_rank(groups: Sequence[Mapping[int, Shape]], ranks: int) -> Layout:
    """All partitions of a rank together; those of a group without room between them."""
    starts: dict[int, tuple[Shape, int]] = {}
    offset = 0
    for group in groups:
        for number, shape in group.items():
            starts[number] = (shape, offset)
            offset += shape.n_bytes
        offset = _aligned(offset)
    return Layout({number: Place(shape, start, offset) for number, (shape, start) in starts.items()}, ranks * offset)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Others(Protocol):
    """The ranks that share a store (`Peers` is one)."""

    rank: int
    ranks: Sequence[int]

    def exchange_objects(self, mine: Any) -> list[Any]:
        """Each rank's object, in rank order."""


@dataclass
class NodeStore:
    """Partitions in host memory.

    Args:
        segment: at least ``layout.n_bytes``.
        rank, ranks: this rank's place in the partition group, and how many there are.
    """

    segment: NodeSegment
    layout: Layout
    rank: int
    ranks: int
    _registered: Optional[_PageLock] = field(default=None, init=False)

    @classmethod
    def connect(cls, segment: NodeSegment, layout: Layout, others: Others) -> NodeStore:
        """A store in ``segment``."""
        store = cls(segment, layout, others.rank, len(others.ranks))
        if get_accelerator().device_name() == "cuda":
            store._registered = _PageLock(segment.memory)
        return store

    def __contains__(self, number: int) -> bool:
        return number in self.layout.places

    def partition(self, number: int, rank: int) -> torch.Tensor:
        """``(numel,)``: the memory of one rank's partition. Only its owner writes to it."""
        place = self.layout.places[number]
        return self._view(place.offset_bytes + rank * place.stride_bytes, place.shape.n_bytes, place.shape.dtype)

    def own_span(self, numbers: Sequence[int]) -> torch.Tensor:
        """This rank's partitions of a group of `lay_by_rank`, as one vector."""
        places = [self.layout.places[number] for number in numbers]
        start = places[0].offset_bytes + self.rank * places[0].stride_bytes
        return self._view(start, sum(place.shape.n_bytes for place in places), places[0].shape.dtype)

    def whole(self, number: int) -> Optional[torch.Tensor]:
        """``(ranks * numel,)``: a view of all partitions of a parameter; None if they do not lie side by side."""
        place = self.layout.places[number]
        if not place.is_side_by_side:
            return None
        return self._view(place.offset_bytes, self.ranks * place.shape.n_bytes, place.shape.dtype)

    def take(self, number: int, partition: torch.Tensor) -> None:
        """Give ``partition``, this rank's, the memory of the store, with what it holds."""
        room = self.partition(number, self.rank)
        room.copy_(partition.detach().view(-1))
        partition.data = room

    def copy(self, number: int, destination: torch.Tensor) -> None:
        """Copy all partitions to ``destination``, ``(ranks * numel,)`` on any device; on the current stream there."""
        whole = self.whole(number)
        if whole is not None:
            destination.copy_(whole, non_blocking=True)
            return
        for rank, part in enumerate(destination.view(self.ranks, -1)):
            part.copy_(self.partition(number, rank), non_blocking=True)

    def show_progress(self) -> None:
        """Let ranks that wait for this one know that it is getting on."""
        self.segment.count(Counter.PROGRESS)

    def close(self) -> None:
        """Leave the segment. Partitions stay valid; the others go on reading this rank's."""
        if self._registered is not None:
            self._registered.release()
        self.segment.close()

    def _view(self, start_bytes: int, n_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.segment.memory[start_bytes : start_bytes + n_bytes].view(dtype)


class _PageLock:
    """Makes CUDA know host memory, so that copies from it are asynchronous. Has never run on a GPU."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._address: Optional[int] = memory.data_ptr()
        runtime: Any = torch.cuda.cudart()
        error = runtime.cudaHostRegister(self._address, memory.numel(), 0)
        if int(error) != 0:
            # Copies work all the same, one after the other.
            self._address = None

    def release(self) -> None:
        """Safe to call twice."""
        address, self._address = self._address, None
        if address is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(address)
