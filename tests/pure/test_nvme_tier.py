"""Partitions on disk when something goes wrong: nothing is lost in silence, mixed, or left in flight."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from deepspeed.runtime.swap_tensor.chunk_pool import ChunkPool, NoMemoryForChunks
from deepspeed.runtime.swap_tensor.nvme_tier import NvmeTier, State, StoredPartition
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES, aligned_bytes
from deepspeed.runtime.swap_tensor.swap_folder import LOCK_SUFFIX, SwapFolder, remove_leftovers

from tests.swap_engine import PlainEngine

CHUNK_NUMEL = PAGE_BYTES // 4
NUMEL = 5 * CHUNK_NUMEL
"""Five chunks of float32."""


def make_tier(path: Path, chunks: int = 2, checksums: bool = False) -> tuple[NvmeTier, PlainEngine]:
    engine = PlainEngine()
    return NvmeTier(SwapFolder(path, "test"), engine, ChunkPool(PAGE_BYTES, chunks), checksums=checksums), engine


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that direct I/O does not take."""
    return aligned_bytes(tensor.numel() * 4 + 4)[4:].view(torch.float32).copy_(tensor)


def stored(tier: NvmeTier, number: int = 0, fill: float = 1.0) -> StoredPartition:
    partition = tier.add(number, f"layers.{number}.weight", NUMEL, torch.float32)
    tier.write(partition, torch.full((NUMEL,), fill))
    return partition


def read(tier: NvmeTier, partition: StoredPartition, direct: bool = False) -> torch.Tensor:
    room = torch.zeros(NUMEL)
    room = aligned_bytes(NUMEL * 4).view(torch.float32).zero_() if direct else shifted(room)
    tier.read(partition, room).wait()
    return room


def test_no_more_in_flight_than_there_are_chunks(tmp_path: Path) -> None:
    tier, engine = make_tier(tmp_path, chunks=3)
    partition = tier.add(0, "weight", NUMEL, torch.float32)
    tier.write(partition, shifted(torch.arange(float(NUMEL))))
    assert torch.equal(read(tier, partition), torch.arange(float(NUMEL)))
    assert engine.most_in_flight == 3


def test_what_is_needed_now_takes_chunks_from_what_is_read_ahead(tmp_path: Path) -> None:
    tier, engine = make_tier(tmp_path)
    first, second = stored(tier, 0, fill=1.0), stored(tier, 1, fill=2.0)
    ahead = shifted(torch.zeros(NUMEL))
    pending = tier.read(first, ahead)
    assert len(engine.in_flight) == tier.pool.count, "reading ahead takes what is free"
    assert torch.equal(read(tier, second), torch.full((NUMEL,), 2.0))
    pending.wait()
    assert torch.equal(ahead, torch.full((NUMEL,), 1.0))


def test_fault_of_what_was_read_ahead_belongs_to_it(tmp_path: Path) -> None:
    tier, engine = make_tier(tmp_path)
    first, second = stored(tier, 0), stored(tier, 1, fill=2.0)
    engine.faults[engine.submitted] = OSError(errno.EIO, "offset 0", str(first.path))
    pending = tier.read(first, shifted(torch.zeros(NUMEL)))
    assert torch.equal(read(tier, second), torch.full((NUMEL,), 2.0))
    with pytest.raises(OSError, match=r"layers\.0\.weight.*offset 0") as caught:
        pending.wait()
    assert caught.value.errno == errno.EIO
    assert tier.pool.is_idle
    assert torch.equal(read(tier, first), torch.ones(NUMEL)), "reading it again works"


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 3])
def test_reads_into_a_device_on_a_stream_of_their_own(tmp_path: Path, chunks: int) -> None:
    engine = PlainEngine()
    pool = ChunkPool(PAGE_BYTES, chunks, lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True))
    tier = NvmeTier(SwapFolder(tmp_path, "test"), engine, pool, checksums=True)
    partitions = [tier.add(number, f"p{number}", NUMEL, torch.float32) for number in range(4)]
    values = [torch.arange(float(NUMEL)) + number for number in range(4)]
    for partition, value in zip(partitions, values):
        tier.write(partition, value.cuda())
    stream = torch.cuda.Stream()
    rooms, reads = [], []
    computed = torch.ones(2000, 2000, device="cuda")
    for partition in partitions:
        with torch.cuda.stream(stream):
            rooms.append(torch.empty(NUMEL, device="cuda"))
            reads.append(tier.read(partition, rooms[-1]))
        computed = computed @ computed / 2000
    for room, pending, value in zip(rooms, reads, values):
        with torch.cuda.stream(stream):
            pending.wait()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(room.cpu(), value)
    assert computed.eq(1).all()


@pytest.mark.parametrize("direct", [False, True])
def test_failed_overwrite_loses_the_partition_and_says_so(tmp_path: Path, direct: bool) -> None:
    tier, engine = make_tier(tmp_path)
    partition = stored(tier)
    engine.faults[engine.submitted + (0 if direct else 3)] = OSError(errno.EIO, "offset 12288", str(partition.path))
    new = torch.full((NUMEL,), 7.0)
    with pytest.raises(OSError, match=r"could not write layers\.0\.weight .*bytes are free.*offset"):
        tier.write(partition, aligned_bytes(NUMEL * 4).view(torch.float32).copy_(new) if direct else shifted(new))
    assert partition.state is State.LOST
    assert tier.pool.is_idle
    assert not engine.in_flight
    with pytest.raises(OSError, match="was lost when writing it failed"):
        read(tier, partition)
    tier.write(partition, new)
    assert torch.equal(read(tier, partition), new)


def test_first_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    tier, engine = make_tier(tmp_path)
    partition = tier.add(0, "weight", NUMEL, torch.float32)
    engine.faults[0] = OSError(errno.ENOSPC, "offset 0")
    with pytest.raises(OSError, match="could not write weight") as caught:
        tier.write(partition, torch.ones(NUMEL))
    assert caught.value.errno == errno.ENOSPC
    assert partition.state is State.ABSENT
    with pytest.raises(OSError, match="was never written"):
        read(tier, partition)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(b"damage")


@pytest.mark.parametrize("meddle", [truncate, replace, overwrite, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("direct", [False, True])
def test_file_that_somebody_meddled_with_is_not_read(
    tmp_path: Path, meddle: Callable[[Path], None], direct: bool
) -> None:
    tier, _ = make_tier(tmp_path)
    partition, other = stored(tier, 0), stored(tier, 1)
    meddle(partition.path)
    with pytest.raises(OSError, match=r"\.swp.*could not read layers\.0\.weight"):
        read(tier, partition, direct)
    assert torch.equal(read(tier, other, direct), torch.ones(NUMEL))


@pytest.mark.parametrize("direct", [False, True])
def test_checksum_finds_what_the_time_of_change_does_not(tmp_path: Path, direct: bool) -> None:
    tier, _ = make_tier(tmp_path, checksums=True)
    partition = stored(tier)
    before = partition.path.stat()
    overwrite(partition.path)
    os.utime(partition.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OSError, match=rf"offset {PAGE_BYTES}: .* damaged: expected CRC-32"):
        read(tier, partition, direct)


def test_wrong_numbers_of_elements_are_refused(tmp_path: Path) -> None:
    tier, _ = make_tier(tmp_path)
    partition = stored(tier)
    with pytest.raises(ValueError, match=f"expected {NUMEL} elements, got 3"):
        tier.write(partition, torch.ones(3))
    with pytest.raises(ValueError, match=f"expected room for {NUMEL} elements, got 3"):
        tier.read(partition, torch.ones(3))


@pytest.mark.parametrize(("chunk_bytes", "count"), [(0, 1), (PAGE_BYTES + 1, 1), (PAGE_BYTES, 0), (-PAGE_BYTES, 1)])
def test_pool_that_cannot_work_is_refused(chunk_bytes: int, count: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096 bytes"):
        ChunkPool(chunk_bytes, count)


def test_pool_that_does_not_fit_says_how_much_and_what_to_set() -> None:
    available = psutil.virtual_memory().available
    pool = ChunkPool(PAGE_BYTES * (available // PAGE_BYTES), 4)
    with pytest.raises(NoMemoryForChunks, match=r"4 chunks of .* bytes .*available.*buffer_count"):
        pool.try_start(None)  # type: ignore[arg-type]


def test_pool_that_may_not_be_locked_says_how_much_and_what_to_set() -> None:
    def allocate(n_bytes: int) -> torch.Tensor:
        raise AssertionError(f"{n_bytes} bytes were allocated")

    pool = ChunkPool(PAGE_BYTES, 4, allocate, lockable_bytes=lambda: 3 * PAGE_BYTES)
    with pytest.raises(NoMemoryForChunks, match=r"16,384 in all.* only 12,288 bytes more .*`ulimit -l`.*pin_memory"):
        pool.try_start(None)  # type: ignore[arg-type]


def test_pool_is_checked_against_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=3 * PAGE_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(NoMemoryForChunks, match=r"16,384 in all.* only 12,288 bytes of host memory"):
        ChunkPool(PAGE_BYTES, 4).try_start(None)  # type: ignore[arg-type]


# -- whose files they are --


def test_each_folder_is_its_owners_alone(tmp_path: Path) -> None:
    first, second = SwapFolder(tmp_path, "rank0"), SwapFolder(tmp_path, "rank0")
    (first.path / "file").write_text("kept")
    second.remove()
    assert not second.path.exists()
    assert (first.path / "file").read_text() == "kept"
    assert remove_leftovers(tmp_path) == []
    first.remove()
    first.remove()
    assert list(tmp_path.iterdir()) == []


def test_folder_goes_with_its_owner(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, "rank0")
    del folder
    assert list(tmp_path.iterdir()) == []


OWNER = """
import os, sys
from pathlib import Path
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
folder = SwapFolder(Path(sys.argv[1]), "rank0")
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
if sys.argv[2] == "forks":
    if os.fork() == 0:
        sys.exit()
    os.wait()
    print((folder.path / "file").exists(), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


def run_owner(path: Path, end: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", OWNER, str(path), end], capture_output=True, text=True, check=False)
    return result.stdout.split("\n")


def test_files_of_a_killed_run_go_when_the_next_one_starts(tmp_path: Path) -> None:
    left = Path(run_owner(tmp_path, "killed")[0])
    assert (left / "file").exists()
    assert left.with_name(left.name + LOCK_SUFFIX).exists()
    folder = SwapFolder(tmp_path, "rank0")
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([folder.path, folder.path.with_name(folder.path.name + LOCK_SUFFIX)])


def test_files_go_when_a_run_ends_but_not_when_its_child_does(tmp_path: Path) -> None:
    run_owner(tmp_path, "ends")
    assert list(tmp_path.iterdir()) == []
    assert run_owner(tmp_path, "forks")[1] == "True"
    assert list(tmp_path.iterdir()) == []


def test_path_that_is_a_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="nvme_path.*folder on a local disk"):
        SwapFolder(tmp_path / "file" / "zero_stage_3", "rank0")
