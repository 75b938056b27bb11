"""``model.generate`` on ranks that need no other rank.

While an `HfDeepSpeedConfig` lives, transformers has ranks that are done generate on until all are (``synced_gpus``),
since with ZeRO-3 each forward used to need all of them. It costs an all-reduce a token and makes every rank as slow as
the slowest.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch.nn import Module

SYNCED = "synced_gpus"


def generate_alone(root: Module) -> Callable[[], None]:
    """Have what in ``root`` can generate do so without the other ranks, unless it is told ``synced_gpus=True``.

    A ``generate`` that somebody has given to a module in the place of its class's stays. Returns what undoes it.
    """
    generators = [
        part
        for part in root.modules()
        if "generate" not in part.__dict__ and _takes(getattr(type(part), "generate", None), SYNCED)
    ]
    for part in generators:
        # Bound to the module itself, so that a copy of it has a method of its own.
        part.__dict__["generate"] = types.MethodType(_alone(type(part).generate), part)

    def undo() -> None:
        for part in generators:
            part.__dict__.pop("generate", None)

    return undo


def _alone(generate: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_without_others(self: Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        if SYNCED not in given:
            kwargs[SYNCED] = False
        return generate(self, *args, **kwargs)

    return generate_without_others


def _takes(function: Any, argument: str) -> bool:
    return callable(function) and argument in inspect.signature(function).parameters
