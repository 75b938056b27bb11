"""What is known in advance about a model's linear layers: from the user's declaration, and from transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Union

from torch import nn

InjectionPolicy = Mapping[type, Union[str, Sequence[str]]]
"""``{LayerClass: names of the linear layers whose outputs are added up over the ranks}``."""

_ROW_STYLES = ("rowwise", "rowwise_split_input")
# packed_rowwise: a gate and an up projection in one parameter whose output features are its last dimension.
_COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise", "packed_rowwise")


class Role(Enum):
    """What a layer does with a dimension that is divided among the ranks."""

    COLUMN = "column"
    """It makes it: output features are divided."""
    ROW = "row"
    """It uses it up: input features are divided, and outputs are added up."""


def declared_roles(model: nn.Module, policy: InjectionPolicy) -> dict[str, Role]:
    """The layers that an ``injection_policy`` names are ROW, the other linear layers of its classes COLUMN.

    Raises ValueError for what is no module class and for names that no layer has.
    """
    roles: dict[str, Role] = {}
    for layer_class, names in policy.items():
        if not (isinstance(layer_class, type) and issubclass(layer_class, nn.Module)):
            raise ValueError(f"injection_policy: expected classes of modules as keys, got {layer_class!r}")
        endings = (names,) if isinstance(names, str) else tuple(names)
        found: set[str] = set()
        for layer_name, layer in model.named_modules():
            if not isinstance(layer, layer_class):
                continue
            for name, module in layer.named_modules(prefix=layer_name):
                ending = next((ending for ending in endings if name.endswith(ending)), None)
                if ending is not None:
                    found.add(ending)
                if isinstance(module, nn.Linear):
                    roles[name] = Role.ROW if ending is not None else roles.get(name, Role.COLUMN)
        missing = [ending for ending in endings if ending not in found]
        if missing:
            raise ValueError(
                f"injection_policy: {layer_class.__name__} has no module whose name ends in "
                f"{', '.join(map(repr, missing))}"
            )
    return roles


def planned_roles(model: nn.Module) -> dict[str, Role]:
    """The roles in transformers' own ``tp_plan`` of the model, for as much of it as that covers."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    styles = [(re.compile(re.escape(pattern).replace(r"\*", r"\d+") + r"$"), style) for pattern, style in plan.items()]
    roles: dict[str, Role] = {}
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for name in names:
        style = next((style for pattern, style in styles if pattern.match(name)), None)
        if style in _ROW_STYLES:
            roles[name] = Role.ROW
        elif style in _COLUMN_STYLES:
            roles[name] = Role.COLUMN
    return roles
