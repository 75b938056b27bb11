"""Partitions on disk: one file each, written and read through the `async_io` op.

Data moves straight between a file and host memory that begins at a page, and otherwise (a device, a place inside of
other data, another dtype) through the chunks of a `ChunkPool`. So the size of a partition does not matter, and nothing
keeps a second copy of it.
"""

from __future__ import annotations

import enum
import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional, Protocol

import torch
from deepspeed.runtime.swap_tensor.chunk_pool import ChunkPool, Event, Extent, Job, extents_of
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder

LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "tmpfs", "ramfs")
"""Here a file's time of change is what this machine says, at once."""


class Request(Protocol):
    """A transfer that has been submitted."""

    def wait(self) -> int:
        """Return when it is complete, with the number of bytes.

        Raises:
            OSError: it failed, or not all of it was transferred.
        """


class Engine(Protocol):
    """Submits transfers (`deepspeed.ops.aio.engine.IOEngine` is one). ``memory`` is a uint8 vector on the host."""

    def submit_read(self, file: str, memory: torch.Tensor, file_offset: int = 0) -> Request: ...

    def submit_write(self, file: str, memory: torch.Tensor, file_offset: int = 0) -> Request: ...


class SwapFileError(OSError):
    """A swap file is not what was written to it, or cannot be written or read."""

    def __init__(self, code: Optional[int], reason: str, path: Path) -> None:
        super().__init__(code if code is not None else errno.EIO, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class State(enum.Enum):
    """What the file of a partition holds."""

    ABSENT = enum.auto()
    """Nothing yet."""
    STORED = enum.auto()
    """The partition."""
    LOST = enum.auto()
    """Old and new data, since an overwrite failed. It is never read; another write makes it `STORED` again."""


class _Identity(NamedTuple):
    """By which a file is known again. All change if somebody else writes to it or puts another in its place."""

    inode: int
    n_bytes: int
    changed_ns: int


@dataclass
class StoredPartition:
    """A partition that lives on disk."""

    name: str
    """Of the parameter, for messages."""
    path: Path
    numel: int
    dtype: torch.dtype
    state: State = State.ABSENT
    checksums: list[int] = field(default_factory=list)
    """CRC-32 of each chunk, if they are kept."""
    identity: Optional[_Identity] = None

    @property
    def n_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class NvmeTier:
    """Writes partitions to files of one folder, and reads them.

    Args:
        folder: where the files are.
        engine: does the I/O.
        pool: chunks for what cannot be moved directly.
        file_alignment_bytes: files are as long as the next multiple of this, for those that read whole blocks.
        checksums: keep a checksum of each chunk and compare it when it is read.
    """

    folder: SwapFolder
    engine: Engine
    pool: ChunkPool
    file_alignment_bytes: int = PAGE_BYTES
    checksums: bool = False

    def __post_init__(self) -> None:
        self._compares_time = self.folder.file_system in LOCAL_FILE_SYSTEMS

    def add(self, number: int, name: str, numel: int, dtype: torch.dtype) -> StoredPartition:
        """A partition that has not been written yet."""
        return StoredPartition(name, self.folder.path / f"{number}_param.tensor.swp", numel, dtype)

    def write(self, partition: StoredPartition, source: torch.Tensor) -> None:
        """Store ``source``, ``(numel,)`` of any dtype and on any device, and return when it is on its way to the disk.

        Raises:
            OSError: no room, or the disk failed. The partition is `State.ABSENT` or `State.LOST` then.
        """
        if source.numel() != partition.numel:
            raise ValueError(f"{partition.name}: expected {partition.numel} elements, got {source.numel()}")
        before = partition.state
        try:
            self._reserve(partition)
            partition.state = State.LOST
            self._transfer_out(partition, source)
            partition.identity = self._identify(partition)
        except OSError as error:
            if partition.state is State.LOST and before is State.ABSENT:
                partition.state = State.ABSENT
            raise self._explain(partition, error, "write") from error
        partition.state = State.STORED

    def read(self, partition: StoredPartition, destination: torch.Tensor) -> Read:
        """Start reading into ``destination``, ``(numel,)`` of any dtype and on any device.

        Raises:
            OSError: the partition was lost, or the file is not the one that was written.
        """
        if destination.numel() != partition.numel:
            raise ValueError(
                f"{partition.name}: expected room for {partition.numel} elements, got {destination.numel()}"
            )
        try:
            self._check(partition)
        except OSError as error:
            raise self._explain(partition, error, "read") from error
        return Read(self, partition, destination)

    def close(self) -> None:
        """Delete all files."""
        self.folder.remove()

    # -- writing --

    def _reserve(self, partition: StoredPartition) -> None:
        """Have the file's blocks before anything of it is overwritten."""
        descriptor = os.open(partition.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(self._file_bytes(partition), 1))
        finally:
            os.close(descriptor)

    def _transfer_out(self, partition: StoredPartition, source: torch.Tensor) -> None:
        direct = _as_page_aligned_bytes(source, partition.dtype)
        partition.checksums = []
        if direct is None:
            jobs = [_ChunkWrite(self, partition, source, extent) for extent in self._extents(partition)]
            _run(self.pool, jobs)
            partition.checksums = [job.checksum for job in jobs] if self.checksums else []
            return
        request = self.engine.submit_write(str(partition.path), direct)
        try:
            if self.checksums:
                partition.checksums = [zlib.crc32(_buffer(direct, extent)) for extent in self._extents(partition)]
        finally:
            request.wait()

    def _extents(self, partition: StoredPartition) -> Iterator[Extent]:
        return extents_of(partition.n_bytes, self.pool.chunk_bytes)

    def _file_bytes(self, partition: StoredPartition) -> int:
        return -(-partition.n_bytes // self.file_alignment_bytes) * self.file_alignment_bytes

    # -- checking --

    def _identify(self, partition: StoredPartition) -> _Identity:
        status = partition.path.stat()
        return _Identity(status.st_ino, status.st_size, status.st_mtime_ns if self._compares_time else 0)

    def _check(self, partition: StoredPartition) -> None:
        if partition.state is not State.STORED:
            what = "was never written" if partition.state is State.ABSENT else "was lost when writing it failed"
            raise SwapFileError(None, what, partition.path)
        found = self._identify(partition)
        if found != partition.identity:
            raise SwapFileError(
                None,
                "offset 0: the file is not the one that was written: expected (inode, bytes, time of change) "
                f"{tuple(partition.identity or ())}, got {tuple(found)}; nothing else may write to nvme_path",
                partition.path,
            )

    def check_sum(self, partition: StoredPartition, extent: Extent, data: torch.Tensor) -> None:
        """Compare the checksum of what was read of ``extent``, if there is one."""
        if not partition.checksums:
            return
        expected = partition.checksums[extent.offset_bytes // self.pool.chunk_bytes]
        found = zlib.crc32(data.numpy())
        if found != expected:
            raise SwapFileError(
                None,
                f"offset {extent.offset_bytes}: the {extent.n_bytes} bytes there are damaged: expected CRC-32 "
                f"{expected:#010x}, got {found:#010x}",
                partition.path,
            )

    def _explain(self, partition: StoredPartition, error: OSError, verb: str) -> OSError:
        """The same error, with what it means for the parameter and what room the disk has."""
        free = self.folder.free_bytes() if self.folder.path.is_dir() else 0
        reason = error.strerror if isinstance(error, SwapFileError) else str(error)
        return SwapFileError(
            error.errno,
            f"could not {verb} {partition.name} ({partition.n_bytes:,} bytes; {free:,} bytes are free there): {reason}",
            partition.path,
        )


def wait_for_all(waits: Iterable[Callable[[], object]]) -> None:
    """Call each, then raise the first OSError, if there was one: nothing is in flight when this returns or raises."""
    failure: Optional[OSError] = None
    for wait in waits:
        try:
            wait()
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class Read:
    """A read that has been started. `wait` before the destination is used, or given up."""

    def __init__(self, tier: NvmeTier, partition: StoredPartition, destination: torch.Tensor) -> None:
        self._tier = tier
        self._partition = partition
        self._direct = _as_page_aligned_bytes(destination, partition.dtype)
        self._request: Optional[Request] = None
        self._jobs: list[_ChunkRead] = []
        self._started = 0
        self._copies = None if destination.device.type == "cpu" else _DeviceCopies(destination.device)
        if self._direct is not None:
            self._request = tier.engine.submit_read(str(partition.path), self._direct)
            return
        self._jobs = [
            _ChunkRead(tier, partition, destination, extent, self._copies) for extent in tier._extents(partition)
        ]
        while self._started < len(self._jobs) and tier.pool.try_start(self._jobs[self._started]):
            self._started += 1

    def wait(self) -> None:
        """Return when everything has arrived.

        Raises:
            OSError: with the file, the offset, and what was wanted and got. Nothing is written to the destination
                after that.
        """
        try:
            self._wait()
        except OSError as error:
            raise self._tier._explain(self._partition, error, "read") from error

    def _wait(self) -> None:
        request, self._request = self._request, None
        if request is not None and self._direct is not None:
            request.wait()
            for extent in self._tier._extents(self._partition) if self._partition.checksums else ():
                self._tier.check_sum(self._partition, extent, _part(self._direct, extent))
        jobs, self._jobs = self._jobs, []
        _run(self._tier.pool, jobs, self._started)
        if self._copies is not None:
            self._copies.join()


class _DeviceCopies:
    """Copies from pinned memory, on the stream that was current when this was made.

    One that computes nothing lets them overlap with what is computed, and with the disk, which fills other chunks.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.current_stream(device)

    def begin(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy, some time. ``source`` is free after the event."""
        with self._module.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            event: Event = self._stream.record_event()
        return event

    def join(self) -> None:
        """All that was begun is there for what runs after this on the current stream."""
        self._module.current_stream(self._stream.device).wait_stream(self._stream)


class _ChunkRead:
    """One extent, read into a chunk and copied on from there."""

    def __init__(
        self,
        tier: NvmeTier,
        partition: StoredPartition,
        destination: torch.Tensor,
        extent: Extent,
        copies: Optional[_DeviceCopies],
    ) -> None:
        self._copies = copies
        self._tier = tier
        self._partition = partition
        self._destination = destination
        self._extent = extent

    def start(self, chunk: torch.Tensor) -> None:
        self._data = chunk[: self._extent.n_bytes]
        self._request = self._tier.engine.submit_read(str(self._partition.path), self._data, self._extent.offset_bytes)

    def finish(self) -> Optional[Event]:
        self._request.wait()
        self._tier.check_sum(self._partition, self._extent, self._data)
        destination = _elements(self._destination, self._partition, self._extent)
        source = self._data.view(self._partition.dtype)
        if self._copies is not None:
            return self._copies.begin(destination, source)
        destination.copy_(source)
        return None


class _ChunkWrite:
    """One extent, copied to a chunk and written from there."""

    checksum = 0

    def __init__(self, tier: NvmeTier, partition: StoredPartition, source: torch.Tensor, extent: Extent) -> None:
        self._tier = tier
        self._partition = partition
        self._source = source
        self._extent = extent

    def start(self, chunk: torch.Tensor) -> None:
        data = chunk[: self._extent.n_bytes]
        data.view(self._partition.dtype).copy_(_elements(self._source, self._partition, self._extent))
        if self._tier.checksums:
            self.checksum = zlib.crc32(data.numpy())
        self._request = self._tier.engine.submit_write(str(self._partition.path), data, self._extent.offset_bytes)

    def finish(self) -> None:
        self._request.wait()


def _run(pool: ChunkPool, jobs: Sequence[Job], started: int = 0) -> None:
    """Start what has not been, and finish all; after an error too, so that nothing is in flight when this returns."""
    failure: Optional[BaseException] = None
    for number, job in enumerate(jobs):
        if number >= started and failure is None:
            try:
                pool.start(job)
            except BaseException as error:
                failure = error
    for job in jobs:
        try:
            pool.finish(job)
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _as_page_aligned_bytes(data: torch.Tensor, dtype: torch.dtype) -> Optional[torch.Tensor]:
    """``data`` as bytes that disk and memory can exchange directly; None if they cannot."""
    if data.device.type != "cpu" or data.dtype != dtype or not data.is_contiguous() or data.data_ptr() % PAGE_BYTES:
        return None
    return data.detach().view(-1).view(torch.uint8)


def _elements(data: torch.Tensor, partition: StoredPartition, extent: Extent) -> torch.Tensor:
    itemsize = partition.dtype.itemsize
    return data.detach().view(-1)[extent.offset_bytes // itemsize :][: extent.n_bytes // itemsize]


def _part(data: torch.Tensor, extent: Extent) -> torch.Tensor:
    return data[extent.offset_bytes :][: extent.n_bytes]


def _buffer(data: torch.Tensor, extent: Extent) -> memoryview:
    return memoryview(_part(data, extent).numpy())
