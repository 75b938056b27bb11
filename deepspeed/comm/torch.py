"""The base's wrapper of torch.distributed, with its shared-memory sum only where that can work.

The op connects as many ranks as LOCAL_SIZE says if that is the world, and none otherwise. The base calls it all the
same: where LOCAL_SIZE is not set (torchrun) memory is read that is not there, and for a group that is a part of the
world the wrong ranks are waited for.
"""

from __future__ import annotations

import os
from typing import Any, Optional

import torch

from . import _base_torch
from ._base_torch import *  # noqa: F401,F403


class TorchBackend(_base_torch.TorchBackend):
    """See the base's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As the op read it, when it was initialized.
        self._connected_ranks = int(os.environ.get("LOCAL_SIZE") or 0) if self.shm_comm_op is not None else 0

    def inference_all_reduce(self, tensor: torch.Tensor, op: Any, group: Optional[Any] = None) -> Any:
        ranks = torch.distributed.get_world_size(group=group)
        whole_world = ranks == torch.distributed.get_world_size() == self._connected_ranks
        if ranks > 1 and not (whole_world and tensor.device.type == "cpu" and tensor.numel()):
            return torch.distributed.all_reduce(tensor, op=self._reduce_op(op), group=group)
        return super().inference_all_reduce(tensor, op, group)
