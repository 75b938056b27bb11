"""The base's engine, without its walk over all modules around every forward; it loads all of an optimizer on NVMe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Optional

from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
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

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Optional[str] = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Optional[str], Any]:
        """See the base's, which copies the files of an optimizer on NVMe and loads nothing else of it.

        Other ranks of the node that read this one's partitions see all of it, or nothing.
        """
        offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
        with offload.updating() if isinstance(offload, DeepSpeedZeRoOffload) else nullcontext():
            path, client_state = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
            if path is not None and self.zero_nvme_offload_optimizer():
                self._load_rest_of_optimizer(
                    load_dir, Path(path).parent, load_optimizer_states and not load_module_only
                )
        return path, client_state

    def _load_rest_of_optimizer(self, load_dir: str, folder: Path, load_optimizer_states: bool) -> None:
        rank = self.local_rank if self.use_node_local_storage() else self.global_rank
        files = folder / "offloaded_tensors" / f"rank{dp_index_to_str(rank)}"
        if self.optimizer.optimizer_swapper.take_over(files):
            self.optimizer.reset_swap_buffers()
        self.optimizer.checkpoint_event_prologue()
        self._load_zero_checkpoint(load_dir, str(folder.relative_to(load_dir)), load_optimizer_states)
        self.optimizer.checkpoint_event_epilogue()

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
