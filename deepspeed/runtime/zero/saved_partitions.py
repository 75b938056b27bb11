"""A checkpoint of ZeRO-3, read by any number of ranks: of each parameter the part that a rank owns now.

Each rank saved the parts that it owned then. The files are mapped into memory, so what is read of them is what is
asked for, and a rank never holds more than its own part.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, FROZEN_PARAM_FRAGMENTS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import naming_damage


def partition_numel(numel: int, ranks: int) -> int:
    """Elements of a parameter that each of ``ranks`` owns; the last of them may be filled up."""
    return -(-numel // ranks)


@dataclass(frozen=True)
class Piece:
    """Elements that one rank saved and one rank owns now."""

    saved_rank: int
    saved_start: int
    """Within the partition of that rank."""
    start: int
    """Within the partition of the rank that reads."""
    numel: int


def pieces(numel: int, saved_ranks: int, rank: int, ranks: int) -> Iterator[Piece]:
    """Where ``rank`` of ``ranks`` finds its part of a parameter of ``numel`` elements that ``saved_ranks`` saved."""
    own_numel = partition_numel(numel, ranks)
    saved_numel = partition_numel(numel, saved_ranks)
    position = rank * own_numel
    end = min(position + own_numel, numel)
    while position < end:
        saved_rank, saved_start = divmod(position, saved_numel)
        length = min(saved_numel - saved_start, end - position)
        yield Piece(saved_rank, saved_start, position - rank * own_numel, length)
        position += length


@dataclass(frozen=True)
class SubGroup:
    """Parameters that the optimizer updates together: names and shapes, and which of its groups they belong to."""

    shapes: Mapping[str, torch.Size]
    param_group: int


@dataclass(frozen=True)
class _Place:
    """Where the partitions of a parameter begin in the flat tensors of one sub-group."""

    sub_group: int
    offset: int
    shape: torch.Size


class SavedPartitions:
    """One checkpoint.

    Args:
        folder: of its files: the folder that was saved to, and the tag.
        mp_rank: which part of a model that is divided by tensor parallelism.

    Raises:
        FileNotFoundError: a file is not there.
        RuntimeError: a file is damaged.
    """

    def __init__(self, folder: Path, mp_rank: int = 0) -> None:
        self.folder = folder
        self._mp_rank = mp_rank
        self._loaded: dict[Path, dict[str, Any]] = {}
        self.ranks = int(self.model_states(0)["dp_world_size"])

    def model_states(self, rank: int) -> dict[str, Any]:
        """What the rank saved of the model: buffers, shapes, parts of frozen parameters."""
        return self._load(f"zero_pp_rank_{rank}_mp_rank_{self._mp_rank:02d}_model_states.pt")

    def shape(self, name: str) -> Optional[torch.Size]:
        """Of a parameter, trained or not; None if the checkpoint has none of that name."""
        place = self._places.get(name)
        return self._frozen_shapes.get(name) if place is None else place.shape

    def weights(self, name: str, shape: torch.Size, rank: int, ranks: int) -> torch.Tensor:
        """The part of a parameter of that shape, trained or not; flat, and filled up with zeros.

        Raises:
            ValueError: the checkpoint has no such parameter, or of another shape.
        """
        saved_shape = self.shape(name)
        if saved_shape != shape:
            found = "none of that name" if saved_shape is None else f"one of shape {tuple(saved_shape)}"
            raise ValueError(f"{self.folder}: expected parameter {name} of shape {tuple(shape)}, found {found}")
        if name in self._places:
            return self._part(name, rank, ranks, lambda saved, group: self._optimizer(saved)[FP32_FLAT_GROUPS][group])
        return self._join(
            shape.numel(), rank, ranks, lambda saved: self.model_states(saved)[FROZEN_PARAM_FRAGMENTS][name], 0
        )

    def optimizer(self, sub_groups: Sequence[SubGroup], rank: int, ranks: int) -> dict[str, Any]:
        """What ``rank`` would have saved of the weights if there had been ``ranks``, with these sub-groups.

        Raises:
            ValueError: a parameter is missing.
        """
        flats = [
            torch.cat([self.weights(name, shape, rank, ranks) for name, shape in group.shapes.items()])
            for group in sub_groups
        ]
        return {**self._optimizer(0), FP32_FLAT_GROUPS: flats}

    def optimizer_state(
        self, sub_groups: Sequence[SubGroup], param_groups: int, rank: int, ranks: int
    ) -> dict[str, Any]:
        """The ``state_dict`` of the optimizer inside, of ``param_groups`` groups, as `optimizer` would have it.

        Raises:
            ValueError: a parameter is missing or was not trained, or there were not as many groups.
        """
        saved: list[dict[str, Any]] = self._optimizer(0)[OPTIMIZER_STATE_DICT]["param_groups"]
        if len(saved) != param_groups:
            raise ValueError(
                f"{self.folder}: its optimizer has {len(saved)} parameter groups, this one has {param_groups}. Make "
                "the optimizer with the groups that it had, or load with load_optimizer_states=False."
            )
        return {
            "state": {number: self._state(list(group.shapes), rank, ranks) for number, group in enumerate(sub_groups)},
            "param_groups": [
                {**group, "params": [n for n, sub_group in enumerate(sub_groups) if sub_group.param_group == number]}
                for number, group in enumerate(saved)
            ],
        }

    def _state(self, names: Sequence[str], rank: int, ranks: int) -> dict[str, Any]:
        """Of one sub-group. Momenta are as long as the weights; counts are those of its first parameter."""
        first = self._place(names[0]).sub_group
        flat = self._optimizer(0)[FP32_FLAT_GROUPS][first]
        state: dict[str, Any] = {}
        for key, value in self._states(0).get(first, {}).items():
            if torch.is_tensor(value) and value.shape == flat.shape:
                flat_of = partial(self._momentum, key)
                state[key] = torch.cat([self._part(name, rank, ranks, flat_of) for name in names])
            else:
                state[key] = value.clone() if torch.is_tensor(value) else value
        return state

    def _momentum(self, key: str, rank: int, sub_group: int) -> torch.Tensor:
        momentum: torch.Tensor = self._states(rank)[sub_group][key]
        return momentum

    def _states(self, rank: int) -> dict[int, dict[str, Any]]:
        states: dict[int, dict[str, Any]] = self._optimizer(rank)[OPTIMIZER_STATE_DICT]["state"]
        return states

    def _optimizer(self, rank: int) -> dict[str, Any]:
        """What the rank saved of the optimizer. bf16 is in the names of the files."""
        name = f"zero_pp_rank_{rank}_mp_rank_{self._mp_rank:02d}_optim_states.pt"
        if (self.folder / f"bf16_{name}").exists():
            name = f"bf16_{name}"
        state: dict[str, Any] = self._load(name)[OPTIMIZER_STATE_DICT]
        return state

    def _part(self, name: str, rank: int, ranks: int, flat_of: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """A part of what is kept in flat tensors like the weights; ``flat_of`` takes a rank and a sub-group."""
        place = self._place(name)
        return self._join(place.shape.numel(), rank, ranks, lambda saved: flat_of(saved, place.sub_group), place.offset)

    def _join(
        self, numel: int, rank: int, ranks: int, flat_of: Callable[[int], torch.Tensor], offset: int
    ) -> torch.Tensor:
        part = torch.zeros(partition_numel(numel, ranks), dtype=flat_of(0).dtype)
        for piece in pieces(numel, self.ranks, rank, ranks):
            start = offset + piece.saved_start
            saved = flat_of(piece.saved_rank)[start : start + piece.numel]
            if saved.numel() != piece.numel:
                raise ValueError(
                    f"{self.folder}: rank {piece.saved_rank} saved {saved.numel()} of {piece.numel} elements. An "
                    f"optimizer on NVMe is saved in files of its own, which {self.ranks} ranks with their optimizer "
                    "on NVMe can load, and nobody else."
                )
            part[piece.start : piece.start + piece.numel] = saved
        return part

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise ValueError(
                f"{self.folder}: it has no trained parameter {name}. Train the parameters that were trained then, or "
                "load with load_optimizer_states=False, which takes weights that were trained and weights that were not"
            )
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, _Place]:
        places = {}
        for number, shapes in enumerate(self.model_states(0)["param_shapes"] or ()):
            offset = 0
            for name, shape in shapes.items():
                places[name] = _Place(number, offset, shape)
                offset += partition_numel(math.prod(shape), self.ranks)
        return places

    @cached_property
    def _frozen_shapes(self) -> Mapping[str, torch.Size]:
        return self.model_states(0)["frozen_param_shapes"] or {}

    def _load(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if path not in self._loaded:
            if not path.exists():
                raise FileNotFoundError(
                    f"{path}: no such file. A checkpoint of ZeRO-3 has one of each rank that saved it; all are needed."
                )
            with naming_damage(path):
                # A checkpoint may have been saved in torch's older format, which cannot be mapped.
                self._loaded[path] = torch.load(
                    path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=False
                )
        return self._loaded[path]
