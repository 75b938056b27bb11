"""The base's engine, without its walk over all modules around every forward, and with its own way to load ZeRO-3.

What ZeRO-3 saved can be loaded by any number of ranks, each of which reads its own parts (`SavedPartitions`); into an
engine that only infers, too; and of an optimizer on NVMe everything is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Optional

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.own_partition import read_own, write_own
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, GuestOffload, host_for
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.runtime.zero.residents import is_resident
from deepspeed.runtime.zero.saved_partitions import SavedPartitions
from deepspeed.runtime.zero.vectors import laid_out_as_vectors
from deepspeed.utils import log_dist
from torch.nn import Module, Parameter

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

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Optional[str] = None,
        client_state: dict[str, Any] = {},  # noqa: B006 -- the base's signature
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See the base's, which cannot replace a checkpoint of the same tag if the optimizer is on NVMe.

        Raises:
            OSError: a rank could not write its file. All ranks raise, and the latest checkpoint is the one before.
        """
        if save_dir and self.zero_nvme_offload_optimizer():
            name = f"global_step{self.global_steps}" if tag is None else str(tag)
            replaced = self._optimizer_files(Path(save_dir) / name)
            if replaced.exists():
                shutil.rmtree(replaced)
        return bool(super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters))

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
        """See the base's, which loads only what as many ranks saved.

        Other ranks of the node that read this one's partitions see all of it, or nothing.

        Raises:
            FileNotFoundError: there is no such checkpoint, or a rank's files are missing.
            ValueError: it is of another model or another optimizer.
            RuntimeError: a file is damaged.
        """
        offload = self._offload
        with offload.updating() if offload is not None else nullcontext():
            path, client_state = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states or not self._trains,
                load_lr_scheduler_states,
                load_module_only and self._trains,
                custom_load_fn,
            )
            if path is None:
                return path, client_state
            folder = Path(path).parent
            if self.zero_nvme_offload_optimizer():
                self._load_rest_of_optimizer(load_dir, folder, load_optimizer_states and not load_module_only)
            elif (
                self._partitions_are_loaded_here() and self._trains and (load_module_only or not load_optimizer_states)
            ):
                self.optimizer.checkpoint_event_prologue()
                self.optimizer.load_saved(self._saved(folder), load_optimizer_states=False)
                self.optimizer.checkpoint_event_epilogue()
        return path, client_state

    def _broadcast_model(self) -> None:
        with laid_out_as_vectors(self.module.parameters()):
            super()._broadcast_model()

    # -- ZeRO-3 --

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See the base's. With ZeRO-3 gradients are reduced as they come, and what a step applies is the same.

        `coalesce_grad_reduction` makes one reduction of several backwards.
        """
        with nullcontext() if self._offload is not None else super().no_sync():
            yield

    @property
    def _offload(self) -> Optional[DeepSpeedZeRoOffload]:
        """What partitions the parameters, if this is ZeRO-3."""
        offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
        return offload if isinstance(offload, DeepSpeedZeRoOffload) else None

    @property
    def _trains(self) -> bool:
        """Whether there is an optimizer. Without one, ZeRO-3 has what partitions the parameters in its place."""
        return self.optimizer is not None and self.optimizer is not self._offload

    def _partitions_are_loaded_here(self) -> bool:
        """Whether the base's loading is replaced. Experts that are divided among ranks have files of their own."""
        return self._offload is not None and not self.has_moe_layers

    def _saved(self, folder: Path) -> SavedPartitions:
        return SavedPartitions(folder, self.checkpoint_mp_rank)

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        names: list[str] = super()._get_all_ckpt_names(checkpoints_path, tag)
        if not names and self._partitions_are_loaded_here():
            # There were fewer ranks. What is not partitioned is the same on all of them.
            folder = Path(checkpoints_path) / str(tag)
            names = sorted(
                map(str, folder.glob(f"zero_pp_rank_0_mp_rank_{self.checkpoint_mp_rank:02d}_model_states.pt"))
            )
        if not names:
            raise FileNotFoundError(
                f"{Path(checkpoints_path) / str(tag)}: expected a checkpoint, found "
                f"{_what_is_in(Path(checkpoints_path) / str(tag))}. In {checkpoints_path} there is "
                f"{_what_is_in(Path(checkpoints_path))}."
            )
        return names

    def _load_checkpoint(
        self,
        load_dir: str,
        tag: str,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Optional[str], Any]:
        here = self._partitions_are_loaded_here()
        path, client_state = super()._load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            # To load without it the base would put the whole model together in each rank, from the latest checkpoint.
            load_optimizer_states or here,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        if here and path is not None:
            saved = self._saved(Path(path).parent)
            if self.load_universal_checkpoint():
                self.load_module_state_dict(saved.model_states(0), load_module_strict, custom_load_fn)
            self._load_untrained(saved, load_module_strict)
        return path, client_state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load what ZeRO-3 does not partition; see the base's for all else, such as whole parameters."""
        here = self._partitions_are_loaded_here()
        if here and custom_load_fn is None and not fetch_z3_params:
            _load_whole_tensors(self.module, checkpoint["module"], strict)
            return
        if here:
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: None}
        super().load_module_state_dict(
            checkpoint, strict, custom_load_fn, fetch_z3_params, z3_params_to_fetch, allowed_missing_keys
        )

    def _load_untrained(self, saved: SavedPartitions, strict: bool) -> None:
        """Load what no optimizer here has. In an engine without one that is everything."""
        rank, ranks = dist.get_rank(self.optimizer.dp_process_group), self.seq_dp_world_size
        untrained = {
            name: param
            for param, name in self.param_names.items()
            if is_zero_param(param) and not (self._trains and is_optimized_parameter(param))
        }
        missing = sorted(name for name in untrained if saved.shape(name) is None)
        if missing and strict:
            raise ValueError(f"{saved.folder}: it has no parameters {missing}. Load it with load_module_strict=False.")
        for name, param in untrained.items():
            if name not in missing:
                write_own(param, saved.weights(name, param.ds_shape, rank, ranks))

    def _load_zero_checkpoint(self, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        folder = Path(load_dir) / str(tag)
        if self._partitions_are_loaded_here() and not self.load_universal_checkpoint():
            if not self._trains:
                return True  # Everything is loaded already.
            saved = self._saved(folder)
            weights_alone = not load_optimizer_states and not self.zero_nvme_offload_optimizer()
            if saved.ranks != self.seq_dp_world_size or weights_alone:
                self.optimizer.load_saved(saved, load_optimizer_states)
                return True
        return bool(super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states))

    def _load_rest_of_optimizer(self, load_dir: str, folder: Path, load_optimizer_states: bool) -> None:
        if self.optimizer.optimizer_swapper.take_over(self._optimizer_files(folder)):
            self.optimizer.reset_swap_buffers()
        self.optimizer.checkpoint_event_prologue()
        self._load_zero_checkpoint(load_dir, str(folder.relative_to(load_dir)), load_optimizer_states)
        self.optimizer.checkpoint_event_epilogue()

    def _optimizer_files(self, checkpoint: Path) -> Path:
        """Where a checkpoint has this rank's files of an optimizer on NVMe."""
        rank = self.local_rank if self.use_node_local_storage() else self.global_rank
        return checkpoint / "offloaded_tensors" / f"rank{dp_index_to_str(rank)}"

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """See the base's. Rank 0 gets values that later steps do not change, though parameters may be views."""
        state = super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        gathered = {n for n, p in self.module.named_parameters(remove_duplicate=False) if not is_resident(p)}
        copies: dict[int, torch.Tensor] = {}  # Of tied parameters there is one.
        for name, value in (state or {}).items():
            if name not in gathered:
                if id(value) not in copies:
                    copies[id(value)] = value.clone()
                state[name] = copies[id(value)]
        return state

    def _get_param_fragment_func(self, param: Parameter) -> torch.Tensor:
        return read_own(param) if is_zero_param(param) else param.detach().cpu()

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        only_infers = optimizer is None and self.zero_optimization_stage() == ZeroStageEnum.weights
        host = host_for(self.module) if only_infers else None
        if host is None:
            return super()._configure_zero_optimizer(optimizer)
        log_dist(
            f"ZeRO-3: another engine takes care of the parameters of {type(self.module).__name__}; what this one's "
            "zero_optimization says has no effect",
            ranks=[0],
        )
        return GuestOffload(host)

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


def _load_whole_tensors(module: Module, state: dict[str, Any], strict: bool) -> None:
    """Load what is not partitioned: buffers. Parameters have placeholders in ``state``.

    Raises:
        RuntimeError: with ``strict``, names are missing or unexpected; in any case, shapes differ.
    """
    partitioned = {name for name, param in module.named_parameters(remove_duplicate=False) if is_zero_param(param)}
    result = module.load_state_dict({n: v for n, v in state.items() if n not in partitioned}, strict=False)
    missing = sorted(set(result.missing_keys) - partitioned | partitioned - state.keys())
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"the checkpoint is of another model than {type(module).__name__}: it lacks {missing}, and has "
            f"{sorted(result.unexpected_keys)}, which are not in the model. Load it with load_module_strict=False to "
            "load what they share."
        )


def _what_is_in(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:10] + ["…"] * (len(names) > 10)) or "nothing"
