"""Finding the tensors inside whatever a module takes or returns.

The runtime only looks: a container is never rebuilt and no tensor in it is replaced, so identity and type of what the
user's code passes around are kept by construction.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.GeneratorType,
    torch.nn.Module,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
)
"""What holds no tensor of its own. A module is not entered: its parameters are no input or output."""

_SEQUENCES = (tuple, list, set, frozenset, deque)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, each object once, in the order in which it is found.

    Enters tuples, lists, sets, deques, dicts (their values) and subclasses of these, and the attributes of any other
    object, in ``__dict__`` and in ``__slots__``: dataclasses, ``ModelOutput``, ``DynamicCache``, ``UserDict``.
    Properties are not read and iterators are not consumed, so nothing of the user's runs.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _ATOMS):
        return
    seen: set[int] = set()
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
            continue
        if isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        # Reversed, since the last one pushed is taken first.
        pending.extend(reversed(list(_children(item))))


def _children(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from dict.values(item)
    else:
        for kind in _SEQUENCES:
            if isinstance(item, kind):
                yield from kind.__iter__(item)
    with contextlib.suppress(AttributeError):
        yield from object.__getattribute__(item, "__dict__").values()
    for base in type(item).__mro__:
        if "__slots__" not in base.__dict__:
            continue
        for slot in base.__dict__.values():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield slot.__get__(item)
                except AttributeError:
                    continue
