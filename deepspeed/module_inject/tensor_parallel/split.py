"""How one parameter is divided among the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Span = tuple[int, int]
"""Indices from the first, included, to the second, excluded."""


def spans_numel(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


@dataclass(frozen=True)
class Split:
    """One dimension of a parameter, cut into spans.

    ``spans[rank]`` are the indices along ``dim`` that a rank holds, one run after the other. Ranks may hold the same
    indices (a key-value head that several of them need).
    """

    dim: int
    spans: tuple[tuple[Span, ...], ...]

    def size(self, rank: int) -> int:
        return spans_numel(self.spans[rank])

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's part of a parameter of shape ``whole``."""
        return (*whole[: self.dim], self.size(rank), *whole[self.dim + 1 :])

    def numel(self, whole: Sequence[int], rank: int) -> int:
        numel = 1
        for size in self.shape(whole, rank):
            numel *= size
        return numel

    def take(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of ``tensor``, in memory of its own."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.spans[rank]]
        if len(parts) == 1:
            return parts[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(parts, dim=self.dim)
