"""The base's engine, without its walk over all modules before and after every forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from . import _base_engine
from ._base_engine import *  # noqa: F401,F403


class DeepSpeedEngine(_base_engine.DeepSpeedEngine):
    """See the base's."""

    _walks_modules = True

    def zero_optimization_partition_weights(self) -> bool:
        return self._walks_modules and super().zero_optimization_partition_weights()

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        with self._no_walk():
            return super()._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        with self._no_walk():
            super()._forward_epilogue()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """See the base's. Other ranks of the node that read this one's partitions see all of it, or nothing."""
        offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
        with offload.updating() if isinstance(offload, DeepSpeedZeRoOffload) else nullcontext():
            return super().load_checkpoint(*args, **kwargs)

    def destroy(self) -> None:
        """Take the engine's hooks off the model too: they kept engine and model alive."""
        super().destroy()
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            hook = getattr(self, name, None)
            if hook is not None:
                hook.remove()

    @contextmanager
    def _no_walk(self) -> Iterator[None]:
        # Under stage 3 the base marks each module as being in a forward, so that reads of partitioned parameters are
        # noticed. The runtime knows by itself whether a forward is under way.
        self._walks_modules = False
        try:
            yield
        finally:
            self._walks_modules = True
