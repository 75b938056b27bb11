"""Partitions in the memory of accelerators, read from there by the other ranks (CUDA IPC).

A rank's partitions are in one allocation, which the others map. Unlike memory of the host it ends with its owner, so a
rank that has died takes the others along. Has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.node_segment import NodeSegment
from deepspeed.runtime.zero.node_store import Layout, NodeStore, Others
from torch.multiprocessing.reductions import reduce_tensor


@dataclass
class DeviceStore(NodeStore):
    """See `NodeStore`. The segment only tells the ranks of each other; the layout is one of `lay_by_rank`."""

    memories: Sequence[torch.Tensor] = field(default=(), kw_only=True)
    """uint8, by rank."""

    @classmethod
    def connect(cls, segment: NodeSegment, layout: Layout, others: Others) -> DeviceStore:
        """Allocate this rank's part and map the others'. A collective."""
        ranks = len(others.ranks)
        mine = torch.empty(layout.n_bytes // ranks, dtype=torch.uint8, device=get_accelerator().current_device_name())
        memories = []
        for rank, (rebuild, arguments) in enumerate(others.exchange_objects(reduce_tensor(mine))):
            memories.append(mine if rank == others.rank else rebuild(*arguments))
        return cls(segment, layout, others.rank, ranks, memories=memories)

    def partition(self, number: int, rank: int) -> torch.Tensor:
        place = self.layout.places[number]
        start = place.offset_bytes
        return self.memories[rank][start : start + place.shape.n_bytes].view(place.shape.dtype)

    def own_span(self, numbers: Sequence[int]) -> torch.Tensor:
        places = [self.layout.places[number] for number in numbers]
        start, n_bytes = places[0].offset_bytes, sum(place.shape.n_bytes for place in places)
        return self.memories[self.rank][start : start + n_bytes].view(places[0].shape.dtype)

    def whole(self, number: int) -> Optional[torch.Tensor]:
        return None

    def close(self) -> None:
        super().close()
        self.memories = ()
