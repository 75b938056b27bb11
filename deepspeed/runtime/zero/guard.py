"""`deepspeed.zero.Init` that knows the ranks before it reads a config, and has a word for who runs the model without an
engine.

It gives back the memory of what it partitioned: a model is made parameter by parameter, and the heap of the C library
would keep the size of many of them. Between CPUs parameters are gathered where they stay, without the copy of all of
them that gloo's all-gather makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from deepspeed import comm
from deepspeed.runtime.swap_tensor.heap import HeapTrimmer
from deepspeed.runtime.zero import pairwise, partition_parameters
from deepspeed.runtime.zero.own_partition import whole_host_bytes
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.vectors import as_vector
from torch.distributed import ProcessGroupGloo
from torch.nn import Module, Parameter

_GUARD = "_zero3_guard"


class Init(partition_parameters.Init):
    """See the base's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._heap = HeapTrimmer()
        # The batch sizes of a config are checked against the number of ranks, which without a backend is one.
        if not comm.is_initialized():
            comm.init_distributed()
        super().__init__(*args, **options)

    def _convert_to_deepspeed_param(self, param: Parameter) -> None:
        super()._convert_to_deepspeed_param(param)
        # It is sent to the other ranks and partitioned next; its shape is noted.
        param.data = as_vector(param.data)

    def _allgather_params_sequential(self, param_list: Sequence[Parameter], hierarchy: int = 0) -> None:
        others = self._gather_in_place(param_list)
        super()._allgather_params_sequential(others, hierarchy)

    def _allgather_params_coalesced(
        self, param_list: Sequence[Parameter], hierarchy: int = 0, quantize: bool = False
    ) -> None:
        others = self._gather_in_place(param_list)
        super()._allgather_params_coalesced(others, hierarchy, quantize)

    def _gather_in_place(self, params: Sequence[Parameter]) -> list[Parameter]:
        """Make them whole, all at once; returns those that have to go another way, which are the same on all ranks."""
        started: list[tuple[Parameter, torch.Tensor, pairwise.PairwiseGather]] = []
        others: list[Parameter] = []
        for param in params:
            shard = param.ds_tensor
            group = self._gloo_group_of(param)
            if group is None or not shard.ds_numel or hasattr(shard, "ds_quant_scale"):
                others.append(param)
                continue
            whole = torch.empty(group.size(), shard.ds_numel, dtype=shard.dtype)
            whole[group.rank()].copy_(shard)
            started.append((param, whole, pairwise.all_gather_into_tensor(whole, whole[group.rank()], group=group)))
        for param, whole, gather in started:
            gather.wait()
            param.data = whole.view(-1).narrow(0, 0, param.ds_numel).view(param.ds_shape)
        return others

    def _gloo_group_of(self, param: Parameter) -> Optional[ProcessGroupGloo]:
        """Between which ranks it is partitioned, if they are connected by gloo and compute on the CPU."""
        if self.local_device.type != "cpu":
            return None
        backend = self.get_partition_dp_group(param)._get_backend(self.local_device)
        return backend if isinstance(backend, ProcessGroupGloo) else None

    def _post_init_method(self, module: Module) -> None:
        super()._post_init_method(module)
        self._heap.freed(whole_host_bytes(p for p in module._parameters.values() if _is_partitioned(p)))
        if _GUARD not in module.__dict__ and any(_is_partitioned(p) for p in module._parameters.values()):
            module.__dict__[_GUARD] = module.register_forward_pre_hook(_require_whole)


def remove_guard(module: Module) -> None:
    """An engine takes care of ``module`` from now on."""
    guard = module.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()


def _require_whole(module: Module, args: Any) -> None:
    partitioned = [name for name, param in module._parameters.items() if _is_partitioned(param)]
    if partitioned:
        raise RuntimeError(
            f"{type(module).__name__} is called while its parameters are partitioned ({', '.join(partitioned)}): the "
            "model was made under deepspeed.zero.Init, and no engine gathers them. Pass the model to "
            "deepspeed.initialize and call the engine, or gather them for a while with "
            "deepspeed.zero.GatheredParameters."
        )


def _is_partitioned(param: Any) -> bool:
    return getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE
