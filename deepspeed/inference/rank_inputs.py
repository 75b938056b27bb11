"""The inputs of ranks that hold one model together: they have to be the same on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.module_inject.tensor_parallel.collectives import TensorParallelGroup
from torch import nn
from torch.utils.hooks import RemovableHandle

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, and far from a power of two: 2^64 divided by the golden ratio, as a signed number of 64 bits."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """A word for what the tensors hold, and one for names, shapes, types and plain numbers.

    Caches and other objects are left out: they follow from earlier inputs.
    """
    described, content = [], 0
    for name, value in [*enumerate(args), *sorted(kwargs.items())]:
        if isinstance(value, torch.Tensor):
            described.append(f"{name}:{tuple(value.shape)}:{value.dtype}")
            content = (content * 31 + _content(value)) % (1 << 64)
        elif value is None or isinstance(value, (bool, int, float, str)):
            described.append(f"{name}:{value!r}")
    return zlib.crc32(";".join(described).encode()), content - (1 << 64) if content >= 1 << 63 else content


def _content(tensor: torch.Tensor) -> int:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    words = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device) * _MULTIPLIER
    return int(((words + 1) * places).sum())


def check_inputs(model: nn.Module, group: TensorParallelGroup) -> RemovableHandle:
    """Compare the inputs of each forward of ``model``: one small exchange.

    Where they differ every rank raises RuntimeError, which names the ranks that have something else than rank 0.
    """

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape_word, content_word = fingerprint(args, kwargs)
        rows = group.exchange([shape_word, content_word]).tolist()
        if all(row == rows[0] for row in rows):
            return
        odd = [group.global_ranks[rank] for rank, row in enumerate(rows) if row != rows[0]]
        what = "names, shapes or types" if any(row[0] != rows[0][0] for row in rows) else "values"
        first = group.global_ranks[0]
        raise RuntimeError(
            "tensor parallelism: the ranks hold one model together and need the same inputs, but the"
            f" {what} of those of {_ranks(odd)} differ from those of rank {first}."
            f" Here: {_describe(args, kwargs)}. Give every rank the same batch (no DistributedSampler, the same seed"
            f" before sampling), or take those of rank {first}:"
            " tensor_parallel={'tp_size': N, 'inputs': 'broadcast'}"
        )

    return model.register_forward_pre_hook(before, with_kwargs=True)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    named = [*enumerate(args), *kwargs.items()]
    tensors = [f"{name} {tuple(value.shape)}" for name, value in named if isinstance(value, torch.Tensor)]
    return ", ".join(tensors) or "no tensors"


def take_inputs_of_first_rank(
    args: tuple[Any, ...], kwargs: dict[str, Any], group: TensorParallelGroup, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What rank 0 of the group was given, on every rank: a collective. What cannot be pickled cannot be given."""
    box: list[Any] = [(_moved(args, torch.device("cpu")), _moved(kwargs, torch.device("cpu")))]
    dist.broadcast_object_list(box, src=group.global_ranks[0], group=group.handle)
    taken_args, taken_kwargs = box[0]
    return _moved(taken_args, device), _moved(taken_kwargs, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
