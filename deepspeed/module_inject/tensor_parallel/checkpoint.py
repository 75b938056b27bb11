"""Which tensors of a folder of safetensors files make up each parameter of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from .lazy_tensor import Computed, Joined, LazyTensor, Narrowed, Stacked, Stored, Transposed
from .safetensors_file import SafetensorsFile

_INDEX = "model.safetensors.index.json"


def checkpoint_files(place: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, if it has one; or the one file that ``place`` is.

    Raises FileNotFoundError if there are none, or one of the index is missing.
    """
    if place.is_file():
        return [place]
    index = place / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [place / name for name in names]
    else:
        files = sorted(place.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{place}: {_INDEX} names files that are not there: {', '.join(missing)}")
    if not files:
        raise FileNotFoundError(
            f"{place}: expected *.safetensors files, which can be read in slices, and found none. Convert the weights"
            " (save_pretrained writes safetensors), or load the model yourself and give it to init_inference"
        )
    return files


class Checkpoint:
    """The files of one model, open. ``parameters`` gives a lazy tensor for each name in the model's state dict."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files: list[SafetensorsFile] = []
        try:
            for path in files:
                self.files.append(SafetensorsFile(path))
        except BaseException:
            self.close()
            raise
        self.stored = {name: tensor for file in self.files for name, tensor in file.tensors.items()}

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self.files)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensors_for(self, model: nn.Module) -> tuple[dict[str, LazyTensor], list[str]]:
        """Lazy tensors by the names that the model has, and the names in the files that it has no place for."""
        state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        found: dict[str, LazyTensor] = {}
        unexpected: list[str] = []
        collected: dict[str, tuple[Any, dict[str, list[Stored]]]] = {}
        naming = _Naming(model, state)
        for name in sorted(self.stored, key=_natural):
            tensor = Stored(self.stored[name])
            target, pattern = naming.target_of(name)
            if pattern is not None and target in state:
                converter, sources = collected.setdefault(target, (naming.converter_of(pattern), {}))
                sources.setdefault(pattern, []).append(tensor)
            elif target in state:
                found[target] = tensor
            else:
                unexpected.append(name)
        for target, (converter, sources) in collected.items():
            found.update(_convert(target, converter, sources, model, state))
        return found, unexpected


def _natural(name: str) -> list[tuple[int, Any]]:
    """Experts in the order of their numbers: transformers' order in which tensors of one parameter are stacked."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"\.", name)]


class _Naming:
    """transformers' renaming and conversion of a checkpoint's names for a model; none for other models."""

    def __init__(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self._renamings: list[Any] = []
        self._converters: dict[str, Any] = {}
        self._prefix: Optional[str] = None
        try:
            from transformers import PreTrainedModel
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError:  # no transformers, or one that does not convert
            return
        if not isinstance(model, PreTrainedModel):
            return
        mapping = get_model_conversion_mapping(model)
        self._rename = rename_source_key
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._converters = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        self._in_order = converters

    def target_of(self, name: str) -> tuple[str, Optional[str]]:
        """The name in the model, and the source pattern of the conversion that it goes through."""
        if self._prefix is None:
            return name, None
        target, pattern = self._rename(name, self._renamings, self._in_order, self._prefix, self._state)
        if target not in self._state and name in self._state:
            return name, None
        return target, pattern

    def converter_of(self, pattern: str) -> Any:
        return self._converters[pattern]


def _convert(
    target: str,
    converter: Any,
    sources: Mapping[str, Sequence[Stored]],
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
) -> dict[str, LazyTensor]:
    """What a conversion makes of ``sources`` (by source pattern), by name in the model.

    ``target`` is the name of the first of its results. Operations that are not known here are left to transformers,
    for all of the tensor.
    """
    patterns: list[str] = list(converter.target_patterns)
    names = {pattern: target.replace(patterns[0], pattern, 1) for pattern in patterns}
    results = _follow(converter, sources)
    if results is not None:
        return {names[pattern]: lazy for pattern, lazy in results.items()}

    def compute(name: str) -> torch.Tensor:
        own = deepcopy(converter)
        for pattern, tensors in sources.items():
            for tensor in tensors:
                whole = torch.empty(tensor.shape, dtype=tensor.tensor.dtype)
                tensor.read_into(tensor.whole, whole)
                own.add_tensor(target, tensor.tensor.name, pattern, whole)
        value = own.convert(target, model=model, config=model.config)[name]
        return value[0] if isinstance(value, list) else value

    def lazily(name: str) -> Computed:
        return Computed(tuple(state[name].shape), lambda: compute(name))

    return {name: lazily(name) for name in names.values() if name in state}


def _follow(converter: Any, sources: Mapping[str, Sequence[Stored]]) -> Optional[dict[str, LazyTensor]]:
    """The conversion as lazy tensors by target pattern; None if it has an operation that is not known here."""
    ordered = {pattern: list(sources[pattern]) for pattern in converter.source_patterns if pattern in sources}
    held: dict[str, list[LazyTensor]] = {pattern: list(tensors) for pattern, tensors in ordered.items()}
    targets: list[str] = list(converter.target_patterns)
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            held = {pattern: [Stacked(tuple(tensors), operation.dim)] for pattern, tensors in held.items()}
        elif kind == "Concatenate" and len(targets) == 1 and not operation.num_shards_attribute:
            held = {targets[0]: [Joined(tuple(t for tensors in held.values() for t in tensors), operation.dim)]}
        elif kind == "Transpose" and not operation.check_dims and all(len(tensors) == 1 for tensors in held.values()):
            held = {
                pattern: [Transposed(tensors[0], (operation.dim0, operation.dim1))] for pattern, tensors in held.items()
            }
        elif kind == "Chunk" and len(held) == 1 and not operation.num_shards_attribute:
            chunks = _chunks(next(iter(held.values())), len(targets), operation.dim)
            if chunks is None:
                return None
            held = {pattern: [chunk] for pattern, chunk in zip(targets, chunks)}
        else:
            return None
    if any(len(tensors) != 1 for tensors in held.values()):
        return None
    if len(targets) == 1 and len(held) == 1:
        return {targets[0]: next(iter(held.values()))[0]}
    return {pattern: tensors[0] for pattern, tensors in held.items()} if set(held) == set(targets) else None


def _chunks(tensors: Sequence[LazyTensor], count: int, dim: int) -> Optional[list[LazyTensor]]:
    if len(tensors) != 1 or tensors[0].shape[dim] % count:
        return None
    length = tensors[0].shape[dim] // count
    return [Narrowed(tensors[0], dim, index * length, length) for index in range(count)]
