"""The base's swapper of optimizer state, with a folder that is its own and checkpoints that say what is in them.

A sub-group of the optimizer has one file for its fp32 weights, named by the sub-group, and one for each state of the
optimizer that is as large, named by both: ``3_3.tensor.swp``, ``exp_avg-3_3.tensor.swp``. The engine copies them into
a checkpoint and back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder

from . import _base_optimizer_utils
from ._base_optimizer_utils import *  # noqa: F401,F403

_SUFFIX = ".tensor.swp"


class OptimizerSwapper(_base_optimizer_utils.OptimizerSwapper):
    """See the base's. Two engines may be given one ``base_folder``."""

    def __init__(self, swap_config: Any, aio_config: Any, base_folder: str, *args: Any, **kwargs: Any) -> None:
        self.folder = SwapFolder(Path(base_folder), f"optimizer-rank{dist.get_rank()}")
        super().__init__(swap_config, aio_config, str(self.folder.path), *args, **kwargs)

    def close(self) -> None:
        """Delete the files. State that is on disk only is lost."""
        self.folder.remove()

    def take_over(self, saved: Path) -> bool:
        """Make the files of a checkpoint, which have been copied here under their names, those of this engine.

        The base names them by the numbers of parameters, which differ from engine to engine. Returns whether other
        files than those of the same names were taken.

        Raises:
            RuntimeError: they are of other sub-groups than this engine has.
        """
        infos = sorted(self.swap_params_info.values(), key=lambda info: _first(info.param_id))
        found = sorted({path.name for path in saved.glob(f"*{_SUFFIX}")})
        groups = sorted({_group_of(name) for name in found}, key=_first)
        expected = [self._io_aligned_numel(info.numel()) * self.swap_element_size for info in infos]
        got = [(saved / (group + _SUFFIX)).stat().st_size for group in groups]
        if got != expected:
            raise RuntimeError(
                f"{saved}: expected the optimizer's state of {len(expected)} sub-groups of {expected} bytes, got that "
                f"of {len(got)} of {got} bytes: model, sub_group_size, number of ranks and the aio section have to be "
                "what they were when it was saved"
            )
        own = dict(zip(groups, (info.param_id for info in infos)))
        renamed = {name: name.replace(group, own[group]) for name in found if own[group := _group_of(name)] != group}
        for name in renamed:
            (Path(self.swap_folder) / name).unlink()
        for name, new_name in renamed.items():
            shutil.copyfile(saved / name, Path(self.swap_folder) / new_name)
        return bool(renamed)

    def adopt_state(self, parameter: torch.Tensor, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Have the states ``names`` of ``parameter`` come and go with it from now on, and no others.

        Their files are there. Returns tensors for the optimizer, which are empty as long as they are on disk.
        """
        info = self.swap_params_info[parameter.ds_id]
        del info.tensors[1:]
        tensors = {name: torch.empty(0, dtype=self.dtype) for name in names}
        for name, tensor in tensors.items():
            tensor.ds_id = f"{name}-{parameter.ds_id}"
        info.has_state_tensors = False
        if tensors:
            info.add_state_tensors(list(tensors.values()))
        return tensors


def _group_of(file_name: str) -> str:
    """``3_3`` of ``exp_avg-3_3.tensor.swp``."""
    return file_name.removesuffix(_SUFFIX).rpartition("-")[2]


def _first(group: str) -> int:
    return int(group.partition("_")[0])
