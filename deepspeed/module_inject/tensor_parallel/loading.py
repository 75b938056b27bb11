"""Loading a model that is on the meta device slice by slice: each rank reads its parts of a checkpoint's tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from .checkpoint import Checkpoint
from .layout import Plan
from .lazy_tensor import LazyTensor
from .shard import drop_repeated
from .split import Split

_NAMED = 12


@dataclass(frozen=True)
class Loaded:
    """What a rank read of the checkpoint's tensors, and how long it took."""

    bytes_read: int
    seconds: float


def is_on_meta(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters())


def model_on_meta(folder: Path, dtype: Optional[torch.dtype]) -> nn.Module:
    """The transformers model that ``folder`` has, without its weights.

    Raises ValueError if its weights are quantized: those would have to be loaded by their quantizer.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{folder}: quantized weights cannot be loaded slice by slice. Load the model yourself (from_pretrained)"
            " and give it to init_inference"
        )
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    model_class = getattr(transformers, names[0]) if names else None
    with torch.device("meta"):
        if model_class is None:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = model_class._from_config(config, dtype=dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def load_slices(
    model: nn.Module,
    plan: Plan,
    rank: int,
    files: Sequence[Path],
    dtype: Optional[torch.dtype],
    device: torch.device,
) -> Loaded:
    """Give each parameter of ``model`` this rank's part, read from safetensors ``files``.

    At no time is more in memory than the parts and one slice of one stored tensor; only conversions of transformers
    that cannot be followed in parts need a tensor whole. Raises ValueError if the checkpoint lacks a parameter or has
    it in another shape.
    """
    began = time.perf_counter()
    place = files[0].parent
    with Checkpoint(files) as checkpoint, torch.no_grad():
        found, _ = checkpoint.tensors_for(model)
        names = _names_of_parameters(model)
        lacking = [aliases[0] for aliases in names.values() if not any(alias in found for alias in aliases)]
        if lacking:
            raise ValueError(f"{place}: no tensors for {_some(lacking)}")
        _load_buffers(model, found, device)
        for name, aliases in names.items():
            # A lazy tensor may hold what it computed: it goes as soon as its parameter is done.
            lazy = next(found.pop(alias) for alias in aliases if alias in found)
            parameter = model.get_parameter(name)
            if tuple(lazy.shape) != tuple(parameter.shape):
                raise ValueError(f"{place}: {name}: expected shape {tuple(parameter.shape)}, got {tuple(lazy.shape)}")
            part_dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            skipped = rank > 0 and name in plan.once
            part = _read_part(lazy, plan.splits.get(name), rank, part_dtype, device, skipped)
            _set_parameter(model, aliases, part)
        bytes_read = checkpoint.bytes_read
    drop_repeated(model, plan, rank)
    return Loaded(bytes_read, time.perf_counter() - began)


def _read_part(
    lazy: LazyTensor, split: Optional[Split], rank: int, dtype: torch.dtype, device: torch.device, skipped: bool
) -> torch.Tensor:
    if skipped:
        return torch.zeros(lazy.shape, dtype=dtype, device=device)
    if split is None:
        part = torch.empty(lazy.shape, dtype=dtype, device=device)
        lazy.read_into(lazy.whole, part)
        return part
    part = torch.empty(split.shape(lazy.shape, rank), dtype=dtype, device=device)
    offset = 0
    for start, stop in split.spans[rank]:
        region = (*lazy.whole[: split.dim], (start, stop), *lazy.whole[split.dim + 1 :])
        lazy.read_into(region, part.narrow(split.dim, offset, stop - start))
        offset += stop - start
    return part


def _names_of_parameters(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, tied ones included, by the first of them."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in by_id.values()}


def _set_parameter(model: nn.Module, names: list[str], value: torch.Tensor) -> None:
    parameter = nn.Parameter(value, requires_grad=False)
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, parameter)


def _load_buffers(model: nn.Module, found: dict[str, LazyTensor], device: torch.device) -> None:
    """Buffers that are stored are read; others that are on the meta device are made by the model's own code.

    This comes before the parameters: what transformers' initialization does to those of the same module is lost on the
    meta device. Raises ValueError for a buffer that cannot be made.
    """
    for module_name, module in model.named_modules():
        made = []
        for key, buffer in module.named_buffers(recurse=False):
            name = f"{module_name}.{key}" if module_name else key
            if not buffer.is_meta and name not in found:
                continue
            fresh = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            if name in found:
                found.pop(name).read_into(tuple((0, size) for size in buffer.shape), fresh)
            else:
                made.append(name)
            module._buffers[key] = fresh
        if made and not hasattr(model, "_init_weights"):
            raise ValueError(
                f"{_some(made)}: on the meta device and not in the checkpoint. Build the model so that its buffers are"
                " real (only parameters on the meta device), or store them"
            )
        if made:
            model._init_weights(module)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
