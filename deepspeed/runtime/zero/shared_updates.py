"""Changes of weights that several ranks read: all of them come to it, and nobody sees half of one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from torch.nn import Module, Parameter

_BEFORE_UPDATE = "ds_before_update"


def call_before_update(param: Parameter, agree: Callable[[], None]) -> None:
    """Have `GatheredParameters` call ``agree`` before anybody writes to ``param``. It is a collective."""
    setattr(param, _BEFORE_UPDATE, agree)


class GatheredParameters(partition_parameters.GatheredParameters):
    """See the base's. With a ``modifier_rank``, a rank that does not come is named on the others."""

    def __enter__(self) -> None:
        if self.enabled and self.src_rank is not None:
            # Of several parameters of one engine, one speaks for all.
            for agree in dict.fromkeys(getattr(param, _BEFORE_UPDATE, None) for param in self.params):
                if agree is not None:
                    agree()
        super().__enter__()


def load_together(
    root: Module, updating: Callable[[], AbstractContextManager[None]], is_lent: Callable[[Parameter], bool]
) -> Callable[[], None]:
    """Have ``root.load_state_dict`` be an update that all ranks make together. Returns what undoes it.

    Where parameters are views of memory that other ranks read, each rank writes all of it, and all the same. Inside of
    `GatheredParameters` they are not (``is_lent``): there one rank may call it. So it may of a copy of ``root``, whose
    parameters are its own.
    """
    load = type(root).load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Module, *args: Any, **kwargs: Any) -> Any:
        if self is not root or any(is_lent(param) for param in self.parameters()):
            return load(self, *args, **kwargs)
        with updating():
            return load(self, *args, **kwargs)

    # Bound to the module itself, so that a copy of it has a method of its own.
    root.__dict__["load_state_dict"] = types.MethodType(load_state_dict, root)
    return functools.partial(root.__dict__.pop, "load_state_dict", None)
