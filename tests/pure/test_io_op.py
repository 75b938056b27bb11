"""The I/O op: DeepSpeed's interface, requests of their own, which way the bytes go, threads, pinned memory."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.io_op import BACKENDS, io_op, memory, require_backend, some_bytes, stored

MIB = 2**20
GIB = 2**30


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    require_backend(request.param)
    monkeypatch.setenv("DS_AIO_BACKEND", request.param)
    return request.param


@pytest.fixture
def handle(backend: str):
    with io_op().aio_handle(block_size=65536, queue_depth=4) as handle:
        yield handle


def n_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_handle_tells_its_settings_and_has_the_bases_defaults() -> None:
    with io_op().aio_handle() as handle:
        assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (MIB, 128, 1)
        assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, False)
    with io_op().aio_handle(4096, 8, True, True, 3) as handle:
        assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (4096, 8, 3)
        assert (handle.get_single_submit(), handle.get_overlap_events()) == (True, True)
        assert handle.get_alignment() == 3 * 512


@pytest.mark.parametrize("setting", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_a_setting_that_makes_no_sense_is_named(setting: str) -> None:
    with pytest.raises(ValueError, match=r"expected at least 1, got 0"):
        io_op().aio_handle(**{setting: 0})


def test_a_backend_that_does_not_exist_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_AIO_BACKEND", "libaio")
    with pytest.raises(ValueError, match="DS_AIO_BACKEND: expected one of auto, io_uring, threads, got 'libaio'"):
        io_op().aio_handle()


def test_every_method_takes_the_bases_arguments_and_returns_its_counts(handle, tmp_path: Path) -> None:
    path, data = str(tmp_path / "file"), some_bytes(200_000)
    target = torch.empty_like(data)

    def read_back() -> bool:
        return torch.equal(target, data) and bool(target.zero_().sum() == 0)

    assert handle.write(data, path, True) == 0
    assert handle.read(buffer=target, filename=path, validate=True) == 0
    assert read_back()
    assert handle.pwrite(data, path, False, False) == 1
    assert handle.pread(target, path, True, **{"async": False}) == 1
    assert read_back()
    assert handle.sync_pwrite(buffer=data, filename=path, file_offset=10) == 1
    assert handle.sync_pread(buffer=target, filename=path, file_offset=10) == 1
    assert read_back()
    assert [handle.async_pwrite(data, path, 5), handle.async_pwrite(data, path + "2")] == [0, 0]
    assert handle.wait() == 2
    assert [handle.pread(target, path, True, True, 5), handle.async_pread(torch.empty_like(data), path + "2")] == [0, 0]
    assert handle.sync_pread(torch.empty_like(data), path) == 3, "a synchronous call waits for what went before, too"
    assert read_back()
    assert handle.wait() == 0
    with pytest.raises(TypeError, match="expected the argument async"):
        handle.pread(target, path, False)
    assert io_op().aio_write(data, path, 4096, 8, False, False, True) == 0
    assert io_op().aio_read(target, path, 4096, 8, False, False, True) == 0
    assert read_back()
    assert io_op().deepspeed_memcpy(target, data) == 0
    assert read_back()


@pytest.mark.parametrize("flags", [0, os.O_DIRECT, os.O_APPEND])
def test_a_descriptor_may_be_closed_once_the_write_is_begun(handle, flags: int, tmp_path: Path) -> None:
    """The fast checkpoint writer opens with O_DIRECT, and drains buffers of any multiple of get_alignment()."""
    path, data = tmp_path / "file", some_bytes(100_003)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    except OSError:
        pytest.skip("no O_DIRECT here")
    assert handle.async_pwrite(data[:1536], fd, 0) == 0
    assert handle.async_pwrite(data[1536:], fd=fd, file_offset=1536) == 0
    os.close(fd)
    assert handle.wait() == 2
    if not flags & os.O_APPEND:  # with which the kernel ignores offsets
        assert torch.equal(stored(path), data)
    assert len(stored(path)) == len(data)


def test_dtypes_shapes_and_views_go_as_they_lie_in_memory(handle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for tensor in (
        torch.randn(33, 65),
        torch.randn(70_001).to(torch.bfloat16)[3:],
        torch.tensor(3.5),
        torch.nn.Parameter(torch.randn(9)),
        torch.arange(24).reshape(2, 3, 4).permute(0, 2, 1).contiguous(),
    ):
        target = torch.zeros_like(tensor.detach())
        handle.sync_pwrite(tensor, path)
        handle.sync_pread(target, path)
        assert torch.equal(target, tensor.detach())


def test_memory_without_order_is_refused(handle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a contiguous tensor, got shape \(4, 4\) with strides \(1, 4\)"):
        handle.sync_pwrite(torch.zeros(4, 4).t(), tmp_path / "file")
    with pytest.raises(ValueError, match="expected a contiguous tensor, got shape .* of layout torch.sparse_coo"):
        handle.sync_pwrite(torch.eye(3).to_sparse(), tmp_path / "file")
    with pytest.raises(ValueError, match="meta device"):
        handle.sync_pwrite(torch.empty(3, device="meta"), tmp_path / "file")
    with pytest.raises(ValueError, match="file offset: expected 0 or more, got -1"):
        handle.sync_pwrite(torch.zeros(4), tmp_path / "file", -1)
    with pytest.raises(ValueError, match="no file has 16 bytes at offset 9223372036854775807"):
        handle.sync_pwrite(torch.zeros(4), tmp_path / "file", 2**63 - 1)
    assert not (tmp_path / "file").exists()


def test_nothing_is_read_and_written_too(handle, tmp_path: Path) -> None:
    empty = torch.empty(0)
    assert handle.sync_pwrite(empty, tmp_path / "file") == 1
    assert (tmp_path / "file").stat().st_size == 0
    assert handle.pread(empty, tmp_path / "file", True, False, 2**40) == 1
    with pytest.raises(FileNotFoundError, match="none"):
        handle.sync_pread(empty, tmp_path / "none")


def test_a_write_neither_truncates_nor_touches_what_is_beside_it(handle, tmp_path: Path) -> None:
    path, old = tmp_path / "file", some_bytes(50_000, 1)
    path.write_bytes(old.numpy().tobytes())
    handle.sync_pwrite(some_bytes(10_000, 2), path, 20_001)
    old[20_001:30_001] = some_bytes(10_000, 2)
    assert torch.equal(stored(path), old)


def test_offsets_beyond_4_gib(handle, tmp_path: Path) -> None:
    offset = 5 * GIB + 4321
    handle.sync_pwrite(some_bytes(70_000), tmp_path / "file", offset)
    target = torch.empty(70_000, dtype=torch.uint8)
    handle.sync_pread(target, tmp_path / "file", offset)
    assert torch.equal(target, some_bytes(70_000))
    assert torch.equal(stored(tmp_path / "file", offset), target)


@pytest.mark.slow
def test_transfers_beyond_2_gib(backend: str, tmp_path: Path) -> None:
    """Of a file with a hole, in one block each as far as the kernel goes."""
    n_bytes = 2 * GIB + 4 * MIB + 5
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(n_bytes)
        for at in (0, GIB, 2 * GIB - 1, n_bytes - 3):
            file.seek(at)
            file.write(b"abc")
    tensor = torch.empty(n_bytes, dtype=torch.uint8)
    with io_op().engine(4 * GIB, 2, 1, backend) as engine:
        assert engine.submit_read(path, tensor).wait() == n_bytes
        positions = tensor.nonzero().flatten().tolist()
        assert positions == [at + i for at in (0, GIB, 2 * GIB - 1, n_bytes - 3) for i in range(3)]
        assert engine.submit_write(tmp_path / "copy", tensor).wait() == n_bytes
    assert torch.equal(stored(tmp_path / "copy"), tensor)


def test_validation_finds_the_first_byte_that_differs(handle, tmp_path: Path) -> None:
    path, data = tmp_path / "file", some_bytes(30_000)
    handle.pwrite(data, path, True, True)
    handle._pending[0].request.wait()
    data[12_345] += 1
    with pytest.raises(OSError, match=r"validation of the write of .*file, .* got 12345; at offset 12345") as caught:
        handle.wait()
    assert caught.value.errno == errno.EBADMSG
    assert handle.wait() == 0
    with pytest.raises(ValueError, match="expected the name of a file"):
        handle.pread(data, 0, True, False)


def test_tensors_under_way_are_kept_alive(backend: str, tmp_path: Path) -> None:
    with io_op().aio_handle(block_size=4096, queue_depth=1) as handle:
        expected = [some_bytes(40_000, seed) for seed in range(20)]
        handle.engine.inject_hold(True)
        for seed, data in enumerate(expected):
            parameter = torch.nn.Parameter(data.clone(), requires_grad=False)
            handle.async_pwrite(parameter, tmp_path / str(seed))
            parameter.data = torch.empty(0, dtype=torch.uint8)  # as ZeRO does when it releases one
            del parameter
        noise = [torch.full((40_000,), 255, dtype=torch.uint8) for _ in range(100)]
        handle.engine.inject_hold(False)
        assert handle.wait() == 20
        del noise
    assert all(torch.equal(stored(tmp_path / str(seed)), data) for seed, data in enumerate(expected))


def test_a_request_has_its_own_result(backend: str, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 5000)
    with io_op().engine(4096, 4, 1, backend) as engine:
        good = engine.submit_write(tmp_path / "file", some_bytes(9000))
        bad = engine.submit_read(tmp_path / "short", torch.empty(9000, dtype=torch.uint8))
        assert good.wait() == 9000
        assert good.wait() == 9000, "it can be asked again"
        with pytest.raises(OSError, match="read of .*short, offset 0: wanted 9000 bytes, got 5000; .* end of file"):
            bad.wait()
        assert good.done() and bad.done()
        assert good.error is None
        error = bad.error
        assert (error.errno, error.filename, error.offset) == (errno.ENODATA, str(tmp_path / "short"), 0)
        assert (error.wanted_bytes, error.got_bytes) == (9000, 5000)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_memory_by_address(backend: str, tmp_path: Path) -> None:
    data, target = some_bytes(70_000), torch.zeros(70_000, dtype=torch.uint8)
    with io_op().engine(backend=backend) as engine, engine.open(tmp_path / "file", "rw") as file:
        engine.submit_write(file, (data.data_ptr() + 5, 60_000), 7).wait()
        engine.submit_read(file, (target.data_ptr() + 5, 60_000), 7).wait()
        with pytest.raises(ValueError, match="expected .address, number of bytes."):
            engine.submit_read(file, (0, 1))
    assert torch.equal(target[5:60_005], data[5:60_005])
    assert target[:5].sum() == target[60_005:].sum() == 0


def test_waiting_has_a_limit_and_goes_on_afterwards(backend: str, tmp_path: Path) -> None:
    with io_op().engine(backend=backend) as engine:
        engine.inject_hold(True)
        request = engine.submit_write(tmp_path / "file", some_bytes(5000))
        assert not request.done()
        with pytest.raises(TimeoutError, match="write of .*file, offset 0, 5000 bytes: not done after 0.01 s"):
            request.wait(timeout_s=0.01)
        engine.inject_hold(False)
        assert request.wait(timeout_s=60) == 5000


def test_several_threads_may_wait_for_one_request(backend: str, tmp_path: Path) -> None:
    with io_op().engine(backend=backend) as engine:
        engine.inject_hold(True)
        request = engine.submit_write(tmp_path / "file", some_bytes(5000))
        results: list[int] = []
        waiters = [threading.Thread(target=lambda: results.append(request.wait())) for _ in range(4)]
        for waiter in waiters:
            waiter.start()
        engine.inject_hold(False)
        for waiter in waiters:
            waiter.join(60)
        assert results == [5000] * 4


def test_requests_that_nobody_asks_for_let_go_of_their_memory(backend: str, tmp_path: Path) -> None:
    with io_op().engine(backend=backend) as engine:
        engine.submit_write(tmp_path / "file", some_bytes(5000))
        while engine.stats().n_in_flight_requests > 0:
            time.sleep(0.001)  # nothing announces its end but the request, which is gone
        engine.submit_write(tmp_path / "file", some_bytes(1)).wait()
        assert engine._in_flight == {}


@pytest.mark.parametrize("n_workers", [1, 3])
def test_no_thread_outlives_its_handle(backend: str, n_workers: int, tmp_path: Path) -> None:
    before = n_threads()
    handle = io_op().aio_handle(queue_depth=2, intra_op_parallelism=n_workers)
    assert n_threads() == before + handle.engine.stats().n_threads
    handle.async_pwrite(some_bytes(MIB), tmp_path / "file")
    handle.close()
    assert n_threads() == before
    assert handle.wait() == 1, "the result is still there"
    assert torch.equal(stored(tmp_path / "file"), some_bytes(MIB))
    handle.close()
    with pytest.raises(ValueError, match="this I/O handle is closed"):
        handle.async_pwrite(some_bytes(1), tmp_path / "file")
    dropped = io_op().aio_handle(queue_depth=2, intra_op_parallelism=n_workers)
    dropped.async_pwrite(some_bytes(MIB), tmp_path / "file2")
    del dropped
    assert n_threads() == before
    assert torch.equal(stored(tmp_path / "file2"), some_bytes(MIB))


def test_no_descriptor_is_left_open(backend: str, tmp_path: Path) -> None:
    before = open_descriptors()
    with io_op().aio_handle() as handle:
        for i in range(50):
            handle.async_pwrite(some_bytes(5000), tmp_path / str(i))
        handle.wait()
        with pytest.raises(OSError):
            handle.sync_pread(some_bytes(6000), tmp_path / "1")
    assert open_descriptors() == before


def test_no_more_blocks_are_under_way_than_the_queue_is_deep(backend: str, tmp_path: Path) -> None:
    with io_op().engine(4096, 3, 1, backend) as engine:
        for i in range(4):
            engine.submit_write(tmp_path / str(i), some_bytes(100_000))
    assert (tmp_path / "3").stat().st_size == 100_000
    with io_op().engine(4096, 3, 1, backend) as engine:
        engine.submit_read(tmp_path / "3", torch.empty(100_000, dtype=torch.uint8)).wait()
        assert 1 <= engine.stats().most_blocks_at_once <= 3


@pytest.mark.parametrize(
    ("offset", "n_bytes", "misaligned_by", "direct", "bounced"),
    [
        (0, 8 * 4096, None, 8, 0),
        (0, 8 * 4096, 1, 8, 8),
        (4096, 8 * 4096 + 100, None, 8, 0),  # the tail through the page cache
        (100, 8 * 4096, None, 7, 7),  # memory that suits the file's pages is 4096 - 100 bytes further on
        (100, 8 * 4096, 4096 - (4096 - 100), 7, 0),
        (512, 4096, None, 0, 0),  # no whole page
    ],
)
def test_whole_pages_go_past_the_page_cache(
    backend: str, tmp_path: Path, offset: int, n_bytes: int, misaligned_by: int | None, direct: int, bounced: int
) -> None:
    with io_op().engine(backend=backend) as engine, engine.open(tmp_path / "file", "rw") as file:
        if not file.is_direct:
            pytest.skip("no O_DIRECT here")
        for submit in (engine.submit_write, engine.submit_read):
            before = engine.stats()
            submit(file, memory(n_bytes, misaligned_by), offset).wait()
            after = engine.stats()
            assert after.direct_bytes - before.direct_bytes == direct * 4096
            assert after.bounced_bytes - before.bounced_bytes == bounced * 4096
            assert after.buffered_bytes - before.buffered_bytes == n_bytes - direct * 4096


def test_a_file_system_in_memory_is_used_and_told_of_once(handle, log_lines) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs to write to")
    path = shm / f"test_io_op.{os.getpid()}"
    try:
        for _ in range(2):
            handle.sync_pwrite(some_bytes(10_000), path)
        assert torch.equal(stored(path), some_bytes(10_000))
        assert handle.engine.stats().direct_bytes == 0
    finally:
        path.unlink(missing_ok=True)
    assert len([line for line in log_lines if "is memory" in line]) <= 1


@pytest.fixture
def log_lines():
    import logging

    from deepspeed.utils import logger

    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    collector = Collector()
    logger.addHandler(collector)
    yield lines
    logger.removeHandler(collector)


def test_pinned_memory_is_known_by_every_handle_until_it_is_freed() -> None:
    from deepspeed.ops.op_builder import PinMemoryBuilder

    pins = PinMemoryBuilder().load().pin_handle()
    with io_op().aio_handle() as first, io_op().aio_handle() as second:
        tensor = first.new_cpu_locked_tensor(3 * MIB, torch.empty(0, dtype=torch.bfloat16))
        assert (tensor.shape, tensor.dtype, tensor.data_ptr() % 4096) == ((3 * MIB,), torch.bfloat16, 0)
        tensor.fill_(2)
        assert all(handle.is_pinned(tensor[5:10]) for handle in (first, second, pins))
        assert not first.is_pinned(torch.empty(5))
        assert not second.free_cpu_locked_tensor(torch.empty(5))
        assert second.free_cpu_locked_tensor(tensor)
        assert not second.free_cpu_locked_tensor(tensor)
        assert not first.is_pinned(tensor)
        assert tensor.sum() == 0, "memory that was freed reads zeros instead of ending the process"
        other = pins.new_cpu_locked_tensor(10, torch.empty(0))
        assert first.is_pinned(other)
        assert pins.free_cpu_locked_tensor_by_ptr(other.data_ptr())
        assert first.new_cpu_locked_tensor(0, torch.empty(0)).numel() == 0


def test_pinned_memory_ends_with_its_last_view() -> None:
    def mapped(address: int) -> bool:
        spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)

    from deepspeed.ops.aio.pinned import PINNED

    n_before = len(PINNED._regions)
    view = memory(64 * MIB)[4096:8192]
    address = view.data_ptr()
    view.fill_(1)
    assert mapped(address)
    del view
    assert not mapped(address)
    assert len(PINNED._regions) == n_before


def test_the_native_pin_memory_backend_runs_on_the_forks_op(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    accelerator = get_accelerator()
    pinned = accelerator.pin_memory(torch.arange(10.0).reshape(2, 5))
    assert torch.equal(pinned, torch.arange(10.0).reshape(2, 5))
    assert accelerator.is_pinned(pinned)
    with io_op().aio_handle() as handle:
        assert handle.is_pinned(pinned)
    assert accelerator.unpin_memory(pinned)


def test_signatures_are_the_bases() -> None:
    handle_class = type(io_op().aio_handle())
    names = {
        "read": ["buffer", "filename", "validate", "file_offset"],
        "write": ["buffer", "filename", "validate", "file_offset"],
        "sync_pread": ["buffer", "filename", "file_offset"],
        "sync_pwrite": ["buffer", "filename", "file_offset"],
        "async_pread": ["buffer", "filename", "file_offset"],
        "async_pwrite": ["buffer", "filename", "file_offset", "fd"],
        "new_cpu_locked_tensor": ["num_elem", "example_tenosr"],
        "free_cpu_locked_tensor": ["tensor"],
        "is_pinned": ["buffer"],
        "wait": [],
    }
    for name, expected in names.items():
        assert list(inspect.signature(getattr(handle_class, name)).parameters)[1:] == expected
