"""The base's memory-saving linear function, used only where it saves memory.

It keeps a partitioned weight out of what autograd saves. Without grad nothing is saved, and a weight that is always
whole is there anyway: then torch's own function is faster by the cost of an autograd function written in Python.
"""

from __future__ import annotations

from typing import Optional

import torch

from . import _base_linear
from ._base_linear import *  # noqa: F401,F403

_torch_linear = torch._C._nn.linear


def zero3_linear_wrap(input: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """``input @ weight.T + bias``, in the place of ``torch.nn.functional.linear``."""
    if not torch.is_grad_enabled() or getattr(weight, "ds_resident", False):
        return _torch_linear(input, weight, bias)
    return _base_linear.zero3_linear_wrap(input, weight, bias)
