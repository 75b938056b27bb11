"""The names under which the rest of DeepSpeed reaches partitions on NVMe.

`partition_parameters.py` and `stage3.py` of the base expect a partition that is on disk to pass through a buffer of
the swapper. Here a buffer is made where it is needed, as large as the partition, and on the host it becomes the
parameter itself; so there is no parameter that is too large and no number of parameters that is too many.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.aio.pinned import lockable_bytes
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor.chunk_pool import ChunkPool, fitting_pool
from deepspeed.runtime.swap_tensor.constants import (
    AIO_BLOCK_SIZE,
    AIO_INTRA_OP_PARALLELISM,
    AIO_OVERLAP_EVENTS,
    AIO_QUEUE_DEPTH,
    AIO_SINGLE_SUBMIT,
    AIO_USE_GDS,
)
from deepspeed.runtime.swap_tensor.heap import HeapTrimmer
from deepspeed.runtime.swap_tensor.host_cache import HostCache
from deepspeed.runtime.swap_tensor.nvme_tier import NvmeTier, Read, StoredPartition, wait_for_all
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES, PageStock
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from deepspeed.runtime.swap_tensor.utils import AIO_ALIGNED_BYTES, MIN_AIO_BYTES
from deepspeed.utils.logging import logger
from torch.nn import Parameter

MAX_CHUNK_BYTES = 16 * 2**20
"""Larger ones are not faster."""
MIN_CHUNK_BYTES = 2**20
MAX_CHUNKS = 4


class PartitionedParamStatus(enum.Enum):
    """Where the partition of a parameter is that lives on NVMe. ``param.ds_tensor.status``."""

    AVAILABLE = 1
    """In memory: ``ds_tensor.data`` is the partition."""
    NOT_AVAILABLE = 2
    """On disk only; ``ds_tensor.data`` has no elements of it."""
    INFLIGHT = 3
    """Being read; ``ds_tensor.data`` is not to be used."""


class Pending(Protocol):
    """A read that has been started."""

    def wait(self) -> None:
        """Return when the destination has the partition. Raises OSError if it could not be read."""


class Arrived:
    """There is nothing to wait for, or the stream takes care of it."""

    def wait(self) -> None:
        """Returns at once."""


@dataclass
class _ReadToCache:
    """A read into memory that the cache will keep, copied on from there."""

    read: Read
    buffer: torch.Tensor
    destination: torch.Tensor
    number: int
    cache: HostCache

    def wait(self) -> None:
        self.read.wait()
        self.destination.copy_(self.buffer)
        self.cache.offer(self.number, self.buffer)


@dataclass
class _Several:
    """Reads that belong together."""

    reads: Sequence[Pending]

    def wait(self) -> None:
        wait_for_all(read.wait for read in self.reads)


class Exchanger(Protocol):
    """The other ranks (`Peers` is one)."""

    rank: int

    def exchange_objects(self, mine: Any) -> list[Any]:
        """Each rank's object, in rank order."""


@dataclass
class _Arrival:
    """A partition that is being read."""

    param: Parameter
    buffer: torch.Tensor
    read: Pending


class AsyncPartitionedParameterSwapper:
    """Keeps the partitions of one model's parameters on NVMe.

    Args:
        ds_config: a parsed ds_config whose ``offload_param.device`` is ``nvme``.
        model_dtype: of most parameters. Each partition is stored in its own.
    """

    def __init__(self, ds_config: Any, model_dtype: torch.dtype) -> None:
        self.dtype = model_dtype
        self.swap_config = ds_config.zero_config.offload_param
        self.aio_config = ds_config.aio_config
        self.swap_element_size = model_dtype.itemsize
        self.min_aio_bytes = max(MIN_AIO_BYTES, self.aio_config[AIO_BLOCK_SIZE])
        self._sub_group_numel = int(ds_config.zero_config.sub_group_size)
        # What is released is about as much as is read ahead, or one parameter that may be larger.
        kept_numel = max(int(ds_config.zero_config.prefetch_bucket_size), int(self.swap_config.buffer_size))
        self.stock = PageStock(idle_limit_bytes=kept_numel * self.swap_element_size)
        if self.aio_config[AIO_USE_GDS]:
            logger.warning("ZeRO: aio.use_gds has no effect on parameters: they pass through host memory.")
        self._handle = (
            AsyncIOBuilder()
            .load(verbose=False)
            .aio_handle(
                block_size=self.aio_config[AIO_BLOCK_SIZE],
                queue_depth=self.aio_config[AIO_QUEUE_DEPTH],
                single_submit=self.aio_config[AIO_SINGLE_SUBMIT],
                overlap_events=self.aio_config[AIO_OVERLAP_EVENTS],
                intra_op_parallelism=self.aio_config[AIO_INTRA_OP_PARALLELISM],
            )
        )
        folder = SwapFolder(Path(self.swap_config.nvme_path) / "zero_stage_3", f"params-rank{dist.get_rank()}")
        self.swap_folder = str(folder.path)
        self.tier = NvmeTier(
            folder,
            self._handle.engine,
            self._make_pool(),
            file_alignment_bytes=max(PAGE_BYTES, AIO_ALIGNED_BYTES * self.aio_config[AIO_INTRA_OP_PARALLELISM]),
            checksums=bool(getattr(self.swap_config, "checksum", False)),
        )
        self._heap = HeapTrimmer()
        self.cache = HostCache(int(self.swap_config.max_in_cpu))
        self._partitions: dict[int, StoredPartition] = {}
        self._arrivals: dict[int, _Arrival] = {}
        self._everyones: list[dict[int, StoredPartition]] = []
        """The partitions of each rank, if others than this one's can be read."""
        self._rank = 0
        """This rank's place in it."""
        logger.info(
            "ZeRO: parameters of at least %d bytes a rank go to %s, through %d chunks of %d bytes.",
            self.min_aio_bytes,
            self.swap_folder,
            self.tier.pool.count,
            self.tier.pool.chunk_bytes,
        )

    def _make_pool(self) -> ChunkPool:
        wanted_bytes = int(self.swap_config.buffer_size) * self.swap_element_size
        chunk_bytes = min(max(wanted_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        chunk_bytes -= chunk_bytes % PAGE_BYTES
        count = min(max(self.swap_config.buffer_count, 1), MAX_CHUNKS)
        if get_accelerator().device_name() == "cpu" or not self.swap_config.pin_memory:
            return ChunkPool(chunk_bytes, count)
        limit_bytes = lockable_bytes()
        if limit_bytes is not None:
            chunk_bytes, count = fitting_pool(chunk_bytes, count, MIN_CHUNK_BYTES, limit_bytes)
        return ChunkPool(chunk_bytes, count, self._allocate_pinned, lockable_bytes)

    def _allocate_pinned(self, n_bytes: int) -> torch.Tensor:
        pinned: torch.Tensor = self._handle.new_cpu_locked_tensor(n_bytes, torch.empty(0, dtype=torch.uint8))
        return pinned

    def close(self) -> None:
        """Delete the swap files. What is on disk only is lost."""
        self._forget([arrival.param for arrival in list(self._arrivals.values())])
        self.cache.clear()
        self.stock.close()
        self.tier.close()
        self._handle.close()

    # -- what goes to disk --

    def swappable_tensor(self, param: Optional[Parameter] = None, numel: Optional[int] = None) -> bool:
        """Whether a partition (of ``param``, or of ``numel`` elements) is large enough to be worth a file."""
        if (param is None) == (numel is None):
            raise ValueError("give either param or numel")
        n_elements = param.ds_tensor.ds_numel if param is not None else numel
        return bool(n_elements * self.swap_element_size >= self.min_aio_bytes)

    def get_buffer(self, param: Parameter, numel: int) -> torch.Tensor:
        """Memory for the partition of ``param``, to be filled and handed to `swap_out_and_release`.

        Where the partition lies in the whole parameter as it has to, that is the memory.
        """
        self._partitions[param.ds_id] = self.tier.add(
            param.ds_id, f"the partition of parameter {param.ds_id} {tuple(param.ds_shape)}", numel, param.dtype
        )
        return self._memory_for(param, numel)

    def _memory_for(self, param: Parameter, numel: int) -> torch.Tensor:
        start = numel * dist.get_rank(group=param.ds_process_group)
        if param.device.type == "cpu" and param.is_contiguous() and start + numel <= param.numel():
            return param.data.view(-1)[start : start + numel]
        return torch.zeros(numel, dtype=param.dtype)

    def swap_out_and_release(
        self, params: Sequence[Parameter], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Write the partitions, and drop them from memory. Complete when this returns, whatever ``async_op`` says.

        Raises:
            OSError: a partition could not be written. It and those after it stay in memory.
        """
        for param in params:
            self._arrive(param)
            self._write(param, param.ds_tensor.data)
            self.remove_partition_and_release_buffers([param])

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Parameter], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Write new values, of any dtype, of partitions that are on disk.

        Raises:
            OSError: a partition could not be written, and is lost.
        """
        for param, values in zip(dst_fp16_params, src_fp32_params):
            self._forget([param])
            self._write(param, values.detach())
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def _write(self, param: Parameter, values: torch.Tensor) -> None:
        self.cache.drop(param.ds_id)
        self.tier.write(self._partitions[param.ds_id], values)
        self._heap.freed(values.numel() * values.element_size())

    # -- what comes back --

    def swap_in(
        self,
        params: Sequence[Parameter],
        async_op: bool = True,
        swap_in_buffers: Optional[Sequence[torch.Tensor]] = None,
    ) -> None:
        """Read partitions that are `NOT_AVAILABLE`, into buffers of their own if none are given.

        Raises:
            OSError: a partition could not be read. All that this call began is `NOT_AVAILABLE` again.
        """
        wrong = [param.ds_id for param in params if param.ds_tensor.status is not PartitionedParamStatus.NOT_AVAILABLE]
        if wrong:
            raise RuntimeError(f"the partitions of parameters {wrong} are in memory or being read already")
        try:
            for position, param in enumerate(params):
                partition = self._partitions[param.ds_id]
                if swap_in_buffers is not None:
                    buffer = swap_in_buffers[position].view(-1)[: partition.numel]
                else:
                    buffer = self.empty_partition(param)
                self._arrivals[param.ds_id] = _Arrival(param, buffer, self.read_into(param, buffer))
                param.ds_tensor.status = PartitionedParamStatus.INFLIGHT
            if not async_op:
                # Whoever reads at once may count on everything that is under way, too.
                self.synchronize_reads()
        except OSError:
            self._forget(params)
            raise

    def empty_partition(self, param: Parameter) -> torch.Tensor:
        """Room on the host for the partition of ``param``, ``(numel,)``, into which the disk reads directly."""
        partition = self._partitions[param.ds_id]
        return self.stock.empty(partition.n_bytes).view(partition.dtype)

    def read_into(self, param: Parameter, destination: torch.Tensor) -> Pending:
        """Start reading the partition of ``param`` into ``destination``, ``(numel,)``; ``ds_tensor`` stays as it is.

        Raises:
            OSError: it was lost, or its file is not what was written.
        """
        partition = self._partitions[param.ds_id]
        cached = self.cache.get(param.ds_id)
        if cached is not None:
            destination.copy_(cached)
            return Arrived()
        if self.cache.wants(param.ds_id, partition.numel):
            buffer = self.empty_partition(param)
            return _ReadToCache(self.tier.read(partition, buffer), buffer, destination, param.ds_id, self.cache)
        return self.tier.read(partition, destination)

    def publish(self, peers: Exchanger) -> None:
        """Tell the other ranks where this one's partitions are, and learn where theirs are. A collective.

        From then on the files of each stay until the last rank has closed its swapper.
        """
        told = peers.exchange_objects((self.tier.folder.path, self._partitions))
        self._rank = peers.rank
        self._everyones = [partitions for _, partitions in told]
        for folder, _ in told:
            self.tier.folder.keep(folder)
        # Nobody may go before all have taken hold of its files.
        peers.exchange_objects(None)

    def read_whole(self, param: Parameter, destination: torch.Tensor) -> Pending:
        """Start reading the partitions of all ranks into ``destination``, ``(ranks * numel,)``.

        Raises:
            OSError: one was lost, or its file is not what was written.
        """
        if not self._everyones:
            return self.read_into(param, destination)
        reads: list[Pending] = []
        try:
            for rank, part in enumerate(destination.view(len(self._everyones), -1)):
                if rank == self._rank:
                    reads.append(self.read_into(param, part))
                else:
                    reads.append(self.tier.read(self._everyones[rank][param.ds_id], part))
        except OSError:
            with contextlib.suppress(OSError):
                _Several(reads).wait()
            raise
        return _Several(reads)

    def finish_swap_in(self, params: Iterable[Parameter]) -> None:
        """Wait for the partitions of ``params`` that are `INFLIGHT`.

        Raises:
            OSError: of the first one that could not be read; the others have arrived.
        """
        wait_for_all(partial(self._arrive, param) for param in params)

    def make_room_for_update(self, param: Parameter) -> None:
        """Have ``ds_tensor``, which has nothing in memory, ready to take a part of the new ``param.data``."""
        self._forget([param])
        param.ds_tensor.data = self._memory_for(param, param.ds_tensor.ds_numel)
        param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def swap_into_buffer(self, param: Parameter, dest_buffer: torch.Tensor) -> None:
        """Read the partition of ``param`` into ``dest_buffer``, ``(numel,)`` of any dtype and on any device.

        Raises:
            OSError: it could not be read.
        """
        self._forget([param])
        self.read_into(param, dest_buffer).wait()

    def synchronize_reads(self) -> None:
        """Wait for all reads. Partitions of those that failed are `NOT_AVAILABLE`.

        Raises:
            OSError: of the first one that failed.
        """
        self.finish_swap_in([arrival.param for arrival in list(self._arrivals.values())])

    def synchronize_writes(self) -> None:
        """Writes are complete when the calls that make them return."""

    def remove_partition_and_release_buffers(self, params: Iterable[Parameter]) -> None:
        """Drop partitions from memory. They are on disk."""
        params = list(params)
        self._forget(params)
        for param in params:
            # Without a dimension: this is how the rest of DeepSpeed knows it.
            param.ds_tensor.data = torch.zeros((), dtype=param.ds_tensor.dtype)
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def available_swap_in_buffers(self) -> int:
        """How many partitions may be read ahead at once."""
        return max(0, self.swap_config.buffer_count - len(self._arrivals))

    def get_path(self, param: Parameter, must_exist: bool = False) -> str:
        """The file of a partition; it holds nothing else and begins with it."""
        if param.ds_id not in self._partitions:
            raise KeyError(f"parameter {param.ds_id} has no partition on NVMe")
        return str(self._partitions[param.ds_id].path)

    # -- what the optimizer on NVMe borrows --

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Page-locked memory for the partitions of any one sub-group of the optimizer."""
        numels = [partition.numel for partition in self._partitions.values()]
        limit = self._sub_group_numel + max(numels, default=0)
        step = self.tier.file_alignment_bytes // self.swap_element_size
        numel = sum(-(-numel // step) * step for numel in numels)
        example = torch.empty(0, dtype=self.dtype)
        return [self._handle.new_cpu_locked_tensor(min(numel, limit + step * len(numels)), example)]

    def release_reserved_buffers(self) -> None:
        """Whoever has them drops them."""

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """New values pass through chunks; nothing has to be reserved."""

    # -- arrivals --

    def _arrive(self, param: Parameter) -> None:
        """Wait for the partition of ``param``, if it is being read."""
        arrival = self._arrivals.pop(param.ds_id, None)
        if arrival is None:
            return
        try:
            arrival.read.wait()
        except OSError:
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE
            raise
        param.ds_tensor.data = arrival.buffer
        param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def _forget(self, params: Iterable[Parameter]) -> None:
        """Give up reads that nobody wants any more."""
        for param in params:
            arrival = self._arrivals.pop(param.ds_id, None)
            if arrival is None:
                continue
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE
            try:
                arrival.read.wait()
            except OSError as error:
                logger.warning("ZeRO: a partition that is not wanted any more could not be read: %s", error)
