"""The part of a parameter that this rank owns, read and written where it is kept: in memory or on NVMe."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from deepspeed.runtime.zero.gather import is_on_disk
from torch.nn import Parameter


def read_own(param: Parameter) -> torch.Tensor:
    """A copy in host memory, flat, filled up to what every rank has.

    Raises:
        OSError: it could not be read from NVMe.
    """
    if is_on_disk(param):
        values = torch.empty(param.ds_tensor.ds_numel, dtype=param.ds_tensor.dtype)
        param.nvme_swapper.swap_into_buffer(param, values)
        return values
    # Not a view: memory that ranks share would be saved with all that is in it.
    copy: torch.Tensor = param.ds_tensor.detach().to("cpu", copy=True)
    return copy


def write_own(param: Parameter, values: torch.Tensor) -> None:
    """Give it new ``values``, of any dtype. The parameter must not be whole, unless it is a view of its partition.

    Raises:
        OSError: it could not be written to NVMe.
    """
    if is_on_disk(param):
        param.nvme_swapper.swap_out_partitioned_params([param], [values.to(param.ds_tensor.dtype)])
    else:
        param.ds_tensor.data.copy_(values)


def whole_host_bytes(params: Iterable[Parameter]) -> int:
    """Host memory that the parameters take when they are whole."""
    return sum(int(param.ds_numel) * param.element_size() for param in params if param.device.type == "cpu")
