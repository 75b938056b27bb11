"""Tensors that are put together from others when a part of them is asked for; only that part is read.

transformers converts some checkpoints while it loads them: tensors for each expert become one tensor for all. These
classes say what such a tensor consists of, so that a rank's part of it can be traced back to parts of files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .safetensors_file import StoredTensor
from .split import Span

Region = tuple[Span, ...]
"""A span for each dimension."""


class LazyTensor(ABC):
    """``shape`` is known; ``read_into`` gives the values of a region."""

    shape: tuple[int, ...]

    @abstractmethod
    def read_into(self, region: Region, target: torch.Tensor) -> None:
        """Fill ``target``, which has the region's shape and any strides, dtype and device."""

    @property
    def whole(self) -> Region:
        return tuple((0, size) for size in self.shape)


@dataclass(frozen=True)
class Stored(LazyTensor):
    """A tensor of a file."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read_into(self, region: Region, target: torch.Tensor) -> None:
        target.copy_(self.tensor.file.read(self.tensor, region))


@dataclass(frozen=True)
class Stacked(LazyTensor):
    """Tensors of one shape, one after the other along a new dimension."""

    parts: tuple[LazyTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        one = self.parts[0].shape
        return (*one[: self.dim], len(self.parts), *one[self.dim :])

    def read_into(self, region: Region, target: torch.Tensor) -> None:
        start, stop = region[self.dim]
        inner = (*region[: self.dim], *region[self.dim + 1 :])
        for index in range(start, stop):
            self.parts[index].read_into(inner, target.select(self.dim, index - start))


@dataclass(frozen=True)
class Joined(LazyTensor):
    """Tensors one after the other along a dimension that they have."""

    parts: tuple[LazyTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        one = self.parts[0].shape
        return (*one[: self.dim], sum(part.shape[self.dim] for part in self.parts), *one[self.dim + 1 :])

    def read_into(self, region: Region, target: torch.Tensor) -> None:
        start, stop = region[self.dim]
        offset = 0
        for part in self.parts:
            size = part.shape[self.dim]
            first, last = max(start, offset), min(stop, offset + size)
            if first < last:
                inner = (*region[: self.dim], (first - offset, last - offset), *region[self.dim + 1 :])
                part.read_into(inner, target.narrow(self.dim, first - start, last - first))
            offset += size


@dataclass(frozen=True)
class Narrowed(LazyTensor):
    """``length`` indices of a tensor along one dimension."""

    part: LazyTensor
    dim: int
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        one = self.part.shape
        return (*one[: self.dim], self.length, *one[self.dim + 1 :])

    def read_into(self, region: Region, target: torch.Tensor) -> None:
        start, stop = region[self.dim]
        moved = (start + self.start, stop + self.start)
        self.part.read_into((*region[: self.dim], moved, *region[self.dim + 1 :]), target)


@dataclass(frozen=True)
class Transposed(LazyTensor):
    """A tensor with two dimensions exchanged."""

    part: LazyTensor
    dims: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return _exchanged(self.part.shape, self.dims)

    def read_into(self, region: Region, target: torch.Tensor) -> None:
        self.part.read_into(_exchanged(region, self.dims), target.transpose(*self.dims))


def _exchanged(values: Sequence, dims: tuple[int, int]) -> tuple:
    exchanged = list(values)
    exchanged[dims[0]], exchanged[dims[1]] = exchanged[dims[1]], exchanged[dims[0]]
    return tuple(exchanged)


@dataclass(frozen=True)
class Computed(LazyTensor):
    """A tensor that is only to be had as a whole: ``compute`` makes it when it is first asked for."""

    shape: tuple[int, ...]
    compute: Callable[[], torch.Tensor]

    @cached_property
    def _value(self) -> torch.Tensor:
        return self.compute()

    def read_into(self, region: Region, target: torch.Tensor) -> None:
        value = self._value
        if tuple(value.shape) != self.shape:
            raise ValueError(f"expected a converted tensor of shape {self.shape}, got {tuple(value.shape)}")
        target.copy_(value[tuple(slice(start, stop) for start, stop in region)])
