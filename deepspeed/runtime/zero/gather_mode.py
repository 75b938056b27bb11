"""Whether ranks gather parameters together, or read each other's partitions (``stage3_gather``)."""

from __future__ import annotations

import enum
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import has_comm_dtype
from torch.nn import Parameter

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class GatherMode(str, enum.Enum):
    """``stage3_gather`` of a ds_config."""

    AUTO = "auto"
    """Read partitions where that is possible, else gather."""
    COLLECTIVE = "collective"
    """All ranks gather together, always."""
    NODE = "node"
    """Read partitions; a ValueError if that is not possible."""


@dataclass(frozen=True)
class Circumstances:
    """What decides it. Not the same on all ranks."""

    machine: str
    """The same on all ranks of a machine, and on no other."""
    hindrance: str = ""
    """Why this rank's partitions cannot be read by others; empty if they can."""
    on_device: bool = False
    """Partitions are in the memory of an accelerator."""


def circumstances_of(params: Sequence[Parameter], hindrance: str = "") -> Circumstances:
    """Of this rank, whose partitions of ``params`` would be read if there is no other ``hindrance``."""
    return Circumstances(_machine(), hindrance or _hindrance(params), any(_is_on_device(p) for p in params))


def why_not(everyones: Sequence[Circumstances], mode: GatherMode) -> str:
    """Why ranks cannot read each other's partitions; empty if they can. The same on all ranks."""
    if len({rank.machine for rank in everyones}) > 1:
        return "the ranks are on several machines"
    for number, rank in enumerate(everyones):
        if rank.hindrance:
            return f"rank {number}: {rank.hindrance}"
    if mode is GatherMode.AUTO and any(rank.on_device for rank in everyones):
        return "the partitions are in device memory; stage3_gather: node reads those too, but has never run on a GPU"
    return ""


def _hindrance(params: Sequence[Parameter]) -> str:
    for param in params:
        shard = param.ds_tensor
        if param.ds_secondary_tensor is not None or param.ds_zero_param_process_group is not None:
            return "zero_hpz_partition_size makes secondary partitions"
        if hasattr(shard, "ds_quant_scale"):
            return "weights are quantized"
        if shard.dtype != param.dtype or has_comm_dtype(param):
            return "parameters are gathered in another dtype than they are kept in"
    return ""


def _is_on_device(param: Parameter) -> bool:
    return get_accelerator().device_name() != "cpu" and bool(param.ds_tensor.device.type != "cpu")


def _machine() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
