"""Parameters that stay whole, because this rank can read all of them where they are kept.

That is so where it owns the whole partition, and where the partitions lie side by side in memory that all ranks of the
node have mapped. ``param.data`` is a view then; nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Optional

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.gather import ALIGNMENT_BYTES
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

Source = Callable[[Parameter], Optional[torch.Tensor]]
"""All elements of a parameter, and what fills its last partition; None if they are not in one place."""


def is_resident(param: Parameter) -> bool:
    """Whether ``param`` is one of some engine's residents."""
    return bool(getattr(param, "ds_resident", False))


def partition_of(param: Parameter) -> torch.Tensor:
    """The source where this rank owns everything."""
    partition: torch.Tensor = param.ds_tensor.data
    return partition


class Residents:
    """The parameters of one engine that stay whole.

    Args:
        params: which.
        source: where they are.
        is_shared: other ranks read there too.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        source: Source,
        is_shared: bool = False,
    ) -> None:
        self.params = list(params)
        self._source = source
        self._is_shared = is_shared
        for param in self.params:
            param.ds_resident = True
            param.ds_persist = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, params: Optional[Iterable[Parameter]] = None) -> None:
        """Make each (of ``params``, if given) a view of where it is kept, if something else has happened to it.

        Of a partition that is not aligned it makes a copy, which `drop_copies` drops.
        """
        for param in self.params if params is None else params:
            flat = self._flat(param)
            # Kernels may require it of a parameter.
            aligned = not flat.data_ptr() % ALIGNMENT_BYTES
            if param.ds_status is ZeroParamStatus.AVAILABLE and (not aligned or self._is_view(param)):
                continue
            flat = flat[: param.ds_numel]
            param.data = (flat if aligned else flat.clone()).view(param.ds_shape)
            param.ds_status = ZeroParamStatus.AVAILABLE

    @torch.inference_mode(False)
    @torch.no_grad()
    def let_go(self) -> None:
        """Drop the views, so that partitions can be moved. `restore` makes them again."""
        for param in self.params:
            self._let_go(param)

    def drop_copies(self) -> None:
        """Let go of what is not a view."""
        for param in self.params:
            if param.ds_status is ZeroParamStatus.AVAILABLE and not self._is_view(param):
                self._let_go(param)

    def dismiss(self) -> None:
        """From now on they come and go like others."""
        self.let_go()
        for param in self.params:
            param.ds_resident = False
            param.ds_persist = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def lend(self, params: Iterable[Parameter]) -> None:
        """Give each a copy of its own, so that what is written to it is not seen by others before `take_back`."""
        for param in params if self._is_shared else ():
            if self._is_view(param):
                param.data = param.data.clone()

    def is_lent(self, param: Parameter) -> bool:
        """Whether it has a copy of its own."""
        return param.ds_status is ZeroParamStatus.AVAILABLE and not (is_resident(param) and self._is_view(param))

    @torch.no_grad()
    def take_back(self, params: Iterable[Parameter], has_been_updated: bool) -> None:
        """End what `lend` began. Others stay lent: one `GatheredParameters` may be in another."""
        params = list(params)
        for param in params:
            if not self._is_view(param):
                if has_been_updated:
                    self._write_partition(param)
                if self._is_shared:
                    self._let_go(param)
        self.restore(params)

    def _write_partition(self, param: Parameter) -> None:
        """From the whole parameter; the rank's own part of it."""
        partition = param.ds_tensor.data
        rank = dist.get_rank(group=param.ds_process_group)
        own = param.data.reshape(-1)[rank * partition.numel() :][: partition.numel()]
        partition[: own.numel()].copy_(own)

    def _flat(self, param: Parameter) -> torch.Tensor:
        flat = self._source(param)
        if flat is None:
            raise RuntimeError(f"parameter of shape {tuple(param.ds_shape)} is not kept in one place")
        return flat

    def _let_go(self, param: Parameter) -> None:
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE

    def _is_view(self, param: Parameter) -> bool:
        return bool(param.data_ptr() == self._flat(param).data_ptr())
