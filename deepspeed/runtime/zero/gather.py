"""Making partitioned parameters whole, and partitioned again.

Owns what is whole, what is in flight and how many elements that is. Knows nothing of modules or of what comes next.

[Note: layout of a gather]

Each rank contributes one slot of bytes, all slots are equally long::

    | fingerprint, flag: 2 × int64 | shard of parameter 0 | pad | shard of parameter 1 | pad | ...

The parts start at multiples of 16 bytes, so shards of any dtypes go through one collective. Whole parameters are copied
out of the received slots into memory of their own, which the allocators of torch align to 64 bytes or more.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.nvme_tier import wait_for_all
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import Arrived, PartitionedParamStatus, Pending
from deepspeed.runtime.torch_autocast import has_comm_dtype
from deepspeed.runtime.zero import pairwise
from deepspeed.runtime.zero.node_store import NodeStore
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

ALIGNMENT_BYTES = 16
HEADER_BYTES = 16
UNREADABLE = -1
"""In the place of the fingerprint: this rank could not read its shards."""


@dataclass
class Statistics:
    """Counted since the engine was made. ``_numel`` are elements of whole parameters, without persistent ones."""

    gathers: int = 0
    """Collectives that gathered parameters."""
    gathered_numel: int = 0
    discarded_fetches: int = 0
    """Parameters that were gathered ahead and given up unused."""
    discarded_numel: int = 0
    live_numel: int = 0
    """Whole or in flight now."""
    peak_live_numel: int = 0
    rounds: int = 0
    """Exchanges in which the ranks told each other where they are."""


class Tier(enum.Enum):
    """How a parameter is made whole."""

    SHARDS = enum.auto()
    """This module's own collective over the partitions, which are in memory or on NVMe."""
    NODE = enum.auto()
    """Copied from where all ranks of the node keep their partitions."""
    DISK = enum.auto()
    """Read from NVMe: all of it is this rank's, or the other ranks' files can be read too."""
    BASE = enum.auto()
    """The base's path: quantized weights, secondary partitions, other dtypes on the wire."""


class GatherFailed(RuntimeError):
    """The other ranks did not take part in a gather, or with other parameters. No number of it was used."""


class PartUnreadable(RuntimeError):
    """Another rank took part in a gather, but could not read what it has to give. It raises what happened there."""


class _Handle(Protocol):
    def wait(self, **kwargs: Any) -> Any: ...


@dataclass
class Collective:
    """A gather that has been started."""

    params: tuple[int, ...]
    fingerprint: int
    arriving: frozenset[int]
    """What was not whole on this rank when it was started, and is wanted here."""
    work: Sequence[_Handle]
    shards: tuple[int, ...] = ()
    """Of ``params``, those in ``received``; the others go the base's way."""
    flag: bool = False
    on_disk: tuple[Parameter, ...] = ()
    """Of ``shards``, those whose partition has to be read first: the collective begins when that is done."""
    failure: Optional[OSError] = None
    """Why they could not be read."""
    reads: list[tuple[int, torch.Tensor, Pending]] = field(default_factory=list)
    """Whole parameters that no other rank is needed for, and where to they come."""
    received: Optional[torch.Tensor] = None
    """``(ranks, slot bytes)`` uint8; None as long as no other rank takes part."""
    bystanders: dict[int, Optional[torch.Tensor]] = field(default_factory=dict)
    """Parameters that the base's path gathers for other ranks only, with their data if they were whole here."""


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_on_disk(param: Parameter) -> bool:
    """Whether the partition of ``param`` is on NVMe and not in memory."""
    shard = param.ds_tensor
    return bool(
        param.nvme_swapper is not None
        and shard.final_location == OffloadDeviceEnum.nvme
        and shard.status is not PartitionedParamStatus.AVAILABLE
    )


def _empty_for(numel: int, param: Parameter) -> torch.Tensor:
    """``(numel,)`` where ``param`` is computed with; on the host so that the disk can be read to directly."""
    device = torch.device(get_accelerator().current_device_name())
    if device.type == "cpu" and param.nvme_swapper is not None:
        room: torch.Tensor = param.nvme_swapper.stock.empty(numel * param.dtype.itemsize)
        return room.view(param.dtype)
    return torch.empty(numel, dtype=param.dtype, device=device)


def _pack(header: torch.Tensor, shards: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
    """Fill ``slot``. All are uint8 vectors."""
    if all(shard.device == slot.device for shard in (header, *shards)):
        parts = [header]
        for shard in shards:
            parts.append(shard)
            if shard.numel() % ALIGNMENT_BYTES:
                parts.append(shard.new_zeros(_padded(shard.numel()) - shard.numel()))
        torch.cat(parts, out=slot)
        return
    offset = 0
    for part in (header, *shards):
        slot[offset : offset + part.numel()].copy_(part, non_blocking=True)
        offset += _padded(part.numel())


@dataclass
class Gatherer:
    """All parameters of one engine that come and go.

    Args:
        timeout_s: how long a gather waits for the other ranks.
        quantized_weights: ``zero_quantized_weights``.
        quantizes: that, or ``zero_quantized_nontrainable_weights``.
        stream: where collectives are issued; None where the device has no streams.
    """

    timeout_s: float
    quantized_weights: bool = False
    quantizes: bool = False
    stream: Any = None
    connection: Optional[Callable[[], torch.distributed.ProcessGroupGloo]] = None
    """Gives the group for gathers rank by rank; None for a collective of the partition group."""
    store: Optional[NodeStore] = None
    """Partitions in memory that can be read without their owners; those on NVMe can then too. None if they cannot."""
    statistics: Statistics = field(default_factory=Statistics)
    params: list[Parameter] = field(default_factory=list)
    """All parameters, by index."""
    names: list[str] = field(default_factory=list)
    numel: list[int] = field(default_factory=list)
    whole: dict[int, None] = field(default_factory=dict)
    """What this object made whole and has not released, persistent parameters left out."""
    unused: set[int] = field(default_factory=set)
    """Of these, what was gathered ahead and not needed so far."""

    def __post_init__(self) -> None:
        self._index: dict[int, int] = {}
        self._tiers: dict[tuple[int, bool], Tier] = {}
        self._placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def register(self, param: Parameter, name: str) -> int:
        """Give ``param`` a number. All ranks register the same parameters in the same order."""
        index = self._index.get(id(param))
        if index is None:
            index = self._index[id(param)] = len(self.params)
            self.params.append(param)
            self.names.append(name)
            self.numel.append(int(param.ds_numel))
        return index

    def index_of(self, param: Parameter) -> Optional[int]:
        """The number of ``param``; None if it is not one of this engine's."""
        return self._index.get(id(param))

    def are_whole(self, params: Iterable[int]) -> bool:
        """Whether all of ``params`` can be computed with."""
        known = self.params
        return all(known[p].ds_status is ZeroParamStatus.AVAILABLE for p in params)

    def missing(self, params: Iterable[int]) -> list[int]:
        """Which of ``params`` are neither whole nor in flight."""
        known = self.params
        return [p for p in params if known[p].ds_status is ZeroParamStatus.NOT_AVAILABLE]

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(
        self,
        params: Sequence[int],
        fingerprint: int,
        flag: bool = False,
        adopt: Optional[Collection[int]] = None,
        alone: bool = False,
    ) -> Collective:
        """Start gathering. A collective of the partition group, whatever is whole here already.

        ``adopt`` is what this rank wants of it (all, if left out); for the rest it only helps the others. If the rank
        is ``alone``, it is no collective, but needs a `store` (or that there is one rank only).

        Raises:
            GatherFailed: another rank has ended.
            OSError: a parameter that no other rank has a part of could not be read.
        """
        arriving = frozenset(p for p in self.missing(params) if adopt is None or p in adopt)
        for index in arriving:
            if index in self.whole:
                # Someone else has partitioned it (GatheredParameters does, as it ends).
                del self.whole[index]
                self._count_out(index)
        self._count_in(arriving)
        self.statistics.gathers += 1
        self.statistics.gathered_numel += sum(self.numel[p] for p in params)
        tiers = {p: self.tier_of(self.params[p], alone) for p in params}
        shards = tuple(p for p in params if tiers[p] is Tier.SHARDS)
        collective = Collective(tuple(params), fingerprint, arriving, work=[], shards=shards, flag=flag)
        try:
            self._start_reads([p for p in params if tiers[p] in (Tier.NODE, Tier.DISK)], collective)
            others = [p for p in params if tiers[p] is Tier.BASE]
            if others:
                self._start_base(others, collective)
            if self.params[params[0]].ds_zero_partition_world_size > 1 and not alone and not collective.on_disk:
                self._start_shards(collective, fingerprint)
        except BaseException:
            self._abandon(collective)
            raise
        for index in arriving:
            self.params[index].ds_status = ZeroParamStatus.INFLIGHT
        return collective

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, collective: Collective) -> bool:
        """Wait, and make what this rank wants whole. True if some rank has set the flag.

        Raises:
            GatherFailed: another rank ended, did not come in time, or gathered something else.
            PartUnreadable: another rank could not read its shards.
            OSError: this one could not.

        Nothing was made whole then.
        """
        try:
            self._finish_reads(collective)
            flagged = self._wait(collective)
        except BaseException:
            self._abandon(collective)
            raise
        if collective.received is not None:
            with self._on_stream():
                self._adopt_shards(collective, collective.received)
        if len(collective.shards) + len(collective.reads) < len(collective.params):
            self._adopt_base(collective)
        self._leave_stream()
        return flagged

    def _start_reads(self, whole: Sequence[int], collective: Collective) -> None:
        """Begin to read parameters for this rank alone, and shards on NVMe that all ranks wait for."""
        for index in whole:
            if index in collective.arriving:
                with self._on_stream():
                    param = self.params[index]
                    into = _empty_for(param.ds_tensor.ds_numel * param.ds_zero_partition_world_size, param)
                    collective.reads.append((index, into, self._start_read(index, into)))
        on_disk = [self.params[p] for p in collective.shards if is_on_disk(self.params[p])]
        collective.on_disk = tuple(on_disk)
        not_begun = [p for p in on_disk if p.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE]
        if not_begun:
            try:
                with self._on_stream():
                    buffers = [_empty_for(param.ds_tensor.ds_numel, param) for param in not_begun]
                    not_begun[0].nvme_swapper.swap_in(not_begun, async_op=True, swap_in_buffers=buffers)
            except OSError as error:
                # The others have to be told, where they wait.
                collective.failure = error

    def _start_read(self, index: int, into: torch.Tensor) -> Pending:
        if self.store is not None and index in self.store:
            self.store.copy(index, into)
            return Arrived()
        swapper = self.params[index].nvme_swapper
        whole: Pending = swapper.read_whole(self.params[index], into)
        return whole

    def _finish_reads(self, collective: Collective) -> None:
        """Wait for them. Shards go to the other ranks; if they could not be read, word of that does."""
        if collective.on_disk:
            self._send_what_was_read(collective)
        with self._on_stream():
            wait_for_all(read.wait for _, _, read in collective.reads)
        for index, whole, _ in collective.reads:
            self._adopt(index, whole)

    def _send_what_was_read(self, collective: Collective) -> None:
        swapper = collective.on_disk[0].nvme_swapper
        if collective.failure is None:
            try:
                with self._on_stream():
                    swapper.finish_swap_in(collective.on_disk)
            except OSError as error:
                collective.failure = error
        self._start_shards(collective, UNREADABLE if collective.failure is not None else collective.fingerprint)
        swapper.remove_partition_and_release_buffers(collective.on_disk)
        if collective.failure is not None:
            with contextlib.suppress(PartUnreadable):
                self._wait(collective)
            raise collective.failure

    def _adopt(self, index: int, whole: torch.Tensor) -> None:
        """``whole`` has the elements of the parameter, and behind them what fills its last shard."""
        param = self.params[index]
        flat = whole.view(-1)
        if flat.numel() != self.numel[index]:
            flat = flat[: self.numel[index]]
        param.data = flat.view(param.ds_shape)
        param.ds_status = ZeroParamStatus.AVAILABLE
        if not param.ds_persist:
            self.whole[index] = None

    def _abandon(self, collective: Collective) -> None:
        for index in collective.arriving:
            self.params[index].ds_status = ZeroParamStatus.NOT_AVAILABLE
            self._count_out(index)

    def _adopt_shards(self, collective: Collective, received: torch.Tensor) -> None:
        """Copy what is wanted out of the slots, each parameter into memory of its own."""
        by_dtype: dict[torch.dtype, torch.Tensor] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        offset = HEADER_BYTES
        for index in collective.shards:
            param = self.params[index]
            numel, dtype = param.ds_tensor.ds_numel, param.dtype
            if index in collective.arriving:
                if dtype not in by_dtype:
                    by_dtype[dtype] = received.view(dtype)
                whole = torch.empty(received.size(0), numel, dtype=dtype, device=received.device)
                targets.append(whole)
                sources.append(by_dtype[dtype].narrow(1, offset // dtype.itemsize, numel))
                self._adopt(index, whole)
            offset += _padded(numel * dtype.itemsize)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _adopt_base(self, collective: Collective) -> None:
        """The base has made them whole."""
        for index in collective.params:
            param = self.params[index]
            if index in collective.bystanders:
                self._restore(param, collective.bystanders[index])
            elif index in collective.arriving and self.tier_of(param) is Tier.BASE:
                self._release_swap_buffer_of_persistent(param)
                if not param.ds_persist:
                    self.whole[index] = None

    def hand_over(self, index: int) -> None:
        """Somebody else has ``index`` now, which is whole, and will partition it."""
        if index in self.whole:
            del self.whole[index]
            self._count_out(index)

    def release(self, index: int) -> None:
        """Partition a parameter that nothing uses any more."""
        if index in self.unused:
            self.unused.discard(index)
            self.statistics.discarded_fetches += 1
            self.statistics.discarded_numel += self.numel[index]
        param = self.params[index]
        if index in self.whole:
            del self.whole[index]
            self._count_out(index)
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            self._give_up(param)

    def _give_up(self, param: Parameter) -> None:
        """Leave ``param`` partitioned, whatever it holds."""
        param.ds_active_sub_modules.clear()
        if self.tier_of(param) is Tier.BASE:
            param.partition()
            return
        if self.stream is not None and get_accelerator().on_accelerator(param.data):
            # The memory goes back to the stream that it came from; this one may still be reading it.
            param.data.record_stream(get_accelerator().current_stream())
        param.data = self._placeholder(param)
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE

    def tier_of(self, param: Parameter, alone: bool = False) -> Tier:
        """Which way ``param`` goes, with all ranks or ``alone``; the same on all ranks."""
        tier = self._tiers.get((id(param), alone))
        if tier is None:
            tier = self._find_tier(param, alone)
            if param.ds_zero_param_process_group is None and param.nvme_swapper is None and not self.quantizes:
                # Without secondary partitions, NVMe and quantization it cannot change.
                self._tiers[id(param), alone] = tier
        return tier

    def _find_tier(self, param: Parameter, alone: bool) -> Tier:
        shard = param.ds_tensor
        if alone and self.store is not None:
            return Tier.NODE if self._index[id(param)] in self.store else Tier.DISK
        if (
            param.ds_secondary_tensor is not None
            or self.quantized_weights
            or hasattr(shard, "ds_quant_scale")
            or shard.dtype != param.dtype
            or has_comm_dtype(param)
        ):
            return Tier.BASE
        if param.ds_zero_partition_world_size > 1:
            return Tier.SHARDS
        return Tier.DISK if is_on_disk(param) else Tier.BASE

    def _count_in(self, indices: Iterable[int]) -> None:
        statistics = self.statistics
        statistics.live_numel += sum(self.numel[index] for index in indices if not self.params[index].ds_persist)
        statistics.peak_live_numel = max(statistics.peak_live_numel, statistics.live_numel)

    def _count_out(self, index: int) -> None:
        if not self.params[index].ds_persist:
            self.statistics.live_numel -= self.numel[index]

    def _start_shards(self, collective: Collective, fingerprint: int) -> None:
        try:
            self._send_shards(collective, fingerprint)
        except RuntimeError as error:
            raise GatherFailed(str(error)) from error

    def _send_shards(self, collective: Collective, fingerprint: int) -> None:
        readable = fingerprint != UNREADABLE
        sizes = [self.params[p].ds_tensor.ds_numel * self.params[p].dtype.itemsize for p in collective.shards]
        slot_bytes = HEADER_BYTES + sum(map(_padded, sizes))
        device = torch.device(get_accelerator().current_device_name())
        group = self.params[collective.params[0]].ds_process_group
        with self._on_stream():
            received = torch.empty(dist.get_world_size(group=group), slot_bytes, dtype=torch.uint8, device=device)
            slot = received[dist.get_rank(group=group)]
            header = torch.tensor([fingerprint, int(collective.flag)], dtype=torch.int64)
            # What could not be read stays what it is in the slot: no rank will use it.
            shards = [self.params[p].ds_tensor.detach().view(torch.uint8) for p in collective.shards if readable]
            _pack(header.view(torch.uint8), shards, slot[: slot_bytes if readable else HEADER_BYTES])
            collective.received = received
            if self.connection is not None:
                work = pairwise.all_gather_into_tensor(received, slot, self.connection())
            else:
                work = dist.all_gather_into_tensor(received.view(-1), slot, group=group, async_op=True)
        collective.work = [*collective.work, work]

    def _start_base(self, params: Sequence[int], collective: Collective) -> None:
        """Through the base's `all_gather_coalesced`, which wants alike parameters together."""
        kinds: dict[tuple[bool, bool], list[Parameter]] = {}
        for index in params:
            param = self.params[index]
            if index not in collective.arriving:
                if param.ds_zero_partition_world_size == 1:
                    continue
                whole = param.ds_status is ZeroParamStatus.AVAILABLE
                collective.bystanders[index] = param.data if whole else None
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
            quantized = hasattr(param.ds_tensor, "ds_quant_scale") or self.quantized_weights
            kinds.setdefault((quantized, param.ds_secondary_tensor is not None), []).append(param)
        with self._on_stream():
            collective.work = [
                alike[0].all_gather_coalesced(alike, quantize=quantized)
                for (quantized, _), alike in sorted(kinds.items(), key=lambda kind: kind[0])
            ]

    def _restore(self, param: Parameter, data: Optional[torch.Tensor]) -> None:
        """Undo what a gather for other ranks did to ``param``."""
        if data is None:
            self._give_up(param)
        else:
            param.data = data

    def _wait(self, collective: Collective) -> bool:
        with self._on_stream():
            for number, handle in enumerate(collective.work, 1):
                if collective.received is not None and number == len(collective.work):
                    try:
                        handle.wait(datetime.timedelta(seconds=self.timeout_s))
                    except RuntimeError as error:
                        raise GatherFailed(str(error)) from error
                else:
                    handle.wait()
            if collective.received is None:
                return False
            headers = collective.received[:, :HEADER_BYTES].cpu().contiguous().view(torch.int64)
        fingerprints, flags = headers.t().tolist()
        unreadable = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint == UNREADABLE]
        if unreadable:
            names = ", ".join(self.names[p] for p in collective.shards)
            raise PartUnreadable(
                f"ranks {unreadable} of the partition group could not read their parts of {names} from NVMe; they "
                "raise what happened"
            )
        if any(fingerprint != collective.fingerprint for fingerprint in fingerprints):
            raise GatherFailed(
                f"gathered {collective.fingerprint:#x} here, but the ranks gathered {[hex(f) for f in fingerprints]}"
            )
        return any(flags)

    def _release_swap_buffer_of_persistent(self, param: Parameter) -> None:
        """It stays whole on the device, so its buffer is free for others."""
        if param.ds_persist and param.ds_tensor.final_location == OffloadDeviceEnum.nvme:
            param.nvme_swapper.remove_partition_and_release_buffers([param])

    def _placeholder(self, param: Parameter) -> torch.Tensor:
        """What a partitioned parameter holds: nothing. Shared by all of one kind."""
        kind = (param.dtype, param.device)
        placeholder = self._placeholders.get(kind)
        if placeholder is None:
            with torch.inference_mode(False):
                placeholder = self._placeholders[kind] = torch.empty(0, dtype=param.dtype, device=param.device)
        return placeholder

    def _on_stream(self) -> Any:
        return get_accelerator().stream(self.stream)

    def _leave_stream(self) -> None:
        if not get_accelerator().resolves_data_dependency():
            get_accelerator().current_stream().wait_stream(self.stream)
