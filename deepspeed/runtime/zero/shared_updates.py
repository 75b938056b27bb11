"""Changes of weights that several ranks read: all of them come to it, and nobody sees half of one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Optional, Protocol

from deepspeed.runtime.swap_tensor.heap import HeapTrimmer
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.own_partition import whole_host_bytes
from deepspeed.runtime.zero.vectors import laid_out_as_vectors
from torch.nn import Module, Parameter

_CARETAKER = "ds_caretaker"
_HEAP = HeapTrimmer()
"""Every weight that transformers reads from a checkpoint passes here."""


class Caretaker(Protocol):
    """Who takes care of the parameters of one engine: `DeepSpeedZeRoOffload`."""

    def agree_on_update(self) -> None:
        """Nobody reads this rank's partitions any more when this returns. A collective."""

    def restore_hooks(self) -> None:
        """Put the model's hooks back, if somebody who took them off could not."""


def set_caretaker(param: Parameter, caretaker: Caretaker) -> None:
    """Have `GatheredParameters` tell ``caretaker`` before anybody writes to ``param``, and after an exception."""
    setattr(param, _CARETAKER, caretaker)


def remove_caretaker(param: Parameter, caretaker: Caretaker) -> None:
    """Undo `set_caretaker`, unless another engine has the parameter by now."""
    if getattr(param, _CARETAKER, None) is caretaker:
        delattr(param, _CARETAKER)


class GatheredParameters(partition_parameters.GatheredParameters):
    """See the base's. With a ``modifier_rank``, a rank that does not come is named on the others.

    Parameters may be of several engines (an actor and its reference): each gathers and updates its own.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Parameter,
        modifier_rank: Optional[int] = None,
        fwd_module: Optional[Module] = None,
        enabled: bool = True,
    ) -> None:
        super().__init__(params, modifier_rank, fwd_module, enabled)
        by_engine: dict[Optional[Caretaker], list[Parameter]] = {}
        for param in self.params if self.enabled else ():
            by_engine.setdefault(getattr(param, _CARETAKER, None), []).append(param)
        self._caretaker = next(iter(by_engine), None)
        self._parts = (
            [GatheredParameters(part, modifier_rank) for part in by_engine.values()] if len(by_engine) > 1 else []
        )
        self._entered = ExitStack()

    def __enter__(self) -> None:
        if self._parts:
            with ExitStack() as entered:
                for part in self._parts:
                    entered.enter_context(part)
                self._entered = entered.pop_all()
            return
        if self.enabled and self.src_rank is not None and self._caretaker is not None:
            self._caretaker.agree_on_update()
        if self.enabled:
            # What was read for it has freed as much (transformers merges the experts of a layer).
            _HEAP.freed(whole_host_bytes(self.params))
        super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self._parts:
            self._entered.__exit__(*exc)
            return
        sent = self.params if self.enabled and self.src_rank is not None else ()
        with laid_out_as_vectors(sent):
            super().__exit__(*exc)
        if self.enabled:
            _HEAP.freed(whole_host_bytes(param for param in self.params if not param.numel()))
        if self._caretaker is not None and exc and exc[0] is not None:
            # Who takes hooks off in here (trl around `generate`) does not put them back then.
            self._caretaker.restore_hooks()


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
