"""Setting up that ranks read each other's partitions, where that is possible."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Optional

from deepspeed.runtime.swap_tensor.heap import HeapTrimmer
from deepspeed.runtime.zero.device_store import DeviceStore
from deepspeed.runtime.zero.gather import is_on_disk
from deepspeed.runtime.zero.gather_mode import GatherMode, circumstances_of, why_not
from deepspeed.runtime.zero.lockstep import Peers
from deepspeed.runtime.zero.node_segment import SegmentUnavailable, share
from deepspeed.runtime.zero.node_store import NodeStore, Shape, lay_by_rank, lay_side_by_side
from deepspeed.utils import logger
from torch.nn import Parameter


def share_partitions(
    params: Sequence[Parameter], peers: Peers, mode: GatherMode, hindrance: str, together: Optional[Collection[int]]
) -> Optional[NodeStore]:
    """Put this rank's partitions where the other ranks can read them. A collective; None if it is not possible.

    Args:
        params: by their numbers; those on NVMe stay there, and the other ranks learn where.
        hindrance: why it is not possible, if the caller knows of something.
        together: numbers of parameters whose partitions an optimizer wants in one piece; None if there is none.

    Raises:
        ValueError: ``mode`` insists on it, and it is not possible.
    """
    store, reason = _try(params, peers, mode, hindrance, together)
    if store is None and mode is GatherMode.NODE:
        raise ValueError(f"stage3_gather: node is not possible, since {reason}. Set it to auto or collective.")
    if peers.rank == 0:
        logger.info(
            "ZeRO-3: %s.",
            "without grad each rank reads the others' partitions, and needs none of them"
            if store is not None
            else f"all ranks gather parameters together, since {reason}",
        )
    return store


def _try(
    params: Sequence[Parameter], peers: Peers, mode: GatherMode, hindrance: str, together: Optional[Collection[int]]
) -> tuple[Optional[NodeStore], str]:
    """The store, or why there is none."""
    if mode is GatherMode.COLLECTIVE:
        return None, "stage3_gather is collective"
    everyones = peers.exchange_objects(circumstances_of(params, hindrance))
    reason = why_not(everyones, mode)
    if reason:
        return None, reason
    ranks = len(peers.ranks)
    on_device = any(rank.on_device for rank in everyones)
    in_memory = {number: param for number, param in enumerate(params) if not is_on_disk(param)}
    shapes = {number: Shape(int(param.ds_tensor.ds_numel), param.dtype) for number, param in in_memory.items()}
    if together is None and not on_device:
        layout = lay_side_by_side(shapes, ranks)
    else:
        layout = lay_by_rank(_groups(shapes, together or ()), ranks)
    try:
        segment = share(0 if on_device else layout.n_bytes, peers.rank, ranks, peers.exchange_objects)
    except SegmentUnavailable as error:
        return None, str(error)
    make = DeviceStore.connect if on_device else NodeStore.connect
    store = make(segment, layout, peers)
    peers.segment = segment
    heap = HeapTrimmer()
    for number, param in in_memory.items():
        store.take(number, param.ds_tensor)
        # Else the allocator keeps what the partitions were in: the model would be in memory twice.
        heap.freed(shapes[number].n_bytes)
    for swapper in {id(param.nvme_swapper): param.nvme_swapper for param in params if param.nvme_swapper}.values():
        swapper.publish(peers)
    # Nobody reads before all have put theirs there.
    peers.exchange_objects(None)
    return store, ""


def _groups(shapes: Mapping[int, Shape], together: Collection[int]) -> list[Mapping[int, Shape]]:
    """One group of what belongs ``together``, in its order, and one of each of the others."""
    others = [{number: shape} for number, shape in shapes.items() if number not in together]
    return [{number: shapes[number] for number in together}, *others]
