"""What ranks of a tensor-parallel group tell each other in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from .split import Split


class TensorParallelGroup:
    """The ranks that hold one model together. ``None`` as a handle is the default process group."""

    def __init__(self, handle: Optional[object] = None) -> None:
        self.handle = handle
        self.size: int = dist.get_world_size(group=handle)
        self.rank: int = dist.get_rank(group=handle)
        self.global_ranks = [dist.get_global_rank(handle, rank) if handle else rank for rank in range(self.size)]

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        contiguous = tensor.contiguous()
        if contiguous.numel() == 0:
            return contiguous
        dist.inference_all_reduce(contiguous, group=self.handle)
        return contiguous

    def put_together(self, tensor: torch.Tensor, features: int, split: Split) -> torch.Tensor:
        """``(..., features)`` from the part ``(..., split.size(rank))`` of each rank."""
        widest = max(split.size(rank) for rank in range(self.size))
        mine = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.handle)
        whole = tensor.new_empty((*tensor.shape[:-1], features))
        for rank, part in enumerate(parts):
            offset = 0
            for start, stop in split.spans[rank]:
                whole[..., start:stop] = part[..., offset : offset + stop - start]
                offset += stop - start
        return whole

    def exchange(self, words: Sequence[int]) -> torch.Tensor:
        """Each rank's ``words``, of 64 bits, in one row for each rank. As many words on every rank."""
        mine = torch.tensor(words, dtype=torch.int64, device=get_accelerator().current_device_name())
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.handle)
        return torch.stack(rows)
