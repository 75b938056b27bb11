"""The I/O op when something breaks: devices, files, limits, forks, the end of the interpreter, a killed build."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch

from tests.fault.test_op_build import LIMIT_S, stuck_compiler
from tests.io_op import BACKENDS, io_op, memory, require_backend, some_bytes, stored

MIB = 2**20


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return require_backend(request.param)


@pytest.fixture
def engine(backend: str):
    with io_op().engine(4096, 4, 1, backend) as engine:
        yield engine


def run_python(code: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own. Takes seconds to import what it needs."""
    preamble = (
        "import os, sys, torch\nfrom deepspeed.ops.op_builder import AsyncIOBuilder\nop = AsyncIOBuilder().load()\n"
    )
    return subprocess.run(
        [sys.executable, *flags, "-c", preamble + textwrap.dedent(code)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", **environment},  # a rank imports in silence
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def in_child(function: Callable[[], object]) -> None:
    """Run a function in a fork of this process, which must come to its end; shows its traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(LIMIT_S)
        try:
            function()
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    assert os.waitpid(child, 0)[1] == 0, text


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ECANCELED, errno.EDQUOT])
@pytest.mark.parametrize("nth", [1, 3, 10])
def test_a_failed_block_fails_its_request_and_no_other(engine, code: int, nth: int, tmp_path: Path) -> None:
    data = some_bytes(10 * 4096)
    (tmp_path / "good").write_bytes(data.numpy().tobytes())
    for submit, operation in ((engine.submit_write, "write"), (engine.submit_read, "read")):
        engine.inject_result(nth, -code)
        bad = submit(tmp_path / "bad", memory(10 * 4096).copy_(data))
        target = memory(10 * 4096)
        with pytest.raises(OSError, match=f"{operation} of .*bad, offset 0: wanted 40960 bytes, got ") as caught:
            bad.wait()
        assert caught.value.errno == code
        assert os.strerror(code) in str(caught.value)
        assert caught.value.got_bytes < 40960
        assert caught.value.failed_offset % 4096 == 0
        assert engine.submit_read(tmp_path / "good", target).wait() == 40960
        assert torch.equal(target, data)
        engine.submit_write(tmp_path / "bad", data).wait()


def test_the_first_error_is_the_one_that_is_told(backend: str, tmp_path: Path) -> None:
    with io_op().engine(4096, 1, 1, backend) as engine:
        engine.inject_result(2, -errno.EIO)
        engine.inject_result(3, -errno.ENOSPC)
        with pytest.raises(OSError) as caught:
            engine.submit_write(tmp_path / "file", memory(40960)).wait()
        assert (caught.value.errno, caught.value.failed_offset, caught.value.got_bytes) == (errno.EIO, 4096, 4096)
        assert engine.stats().n_completions == 2, "the rest is not begun"


def test_nothing_writes_into_memory_after_a_failed_wait(engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff" * 50 * 4096)
    for nth in range(1, 30):
        target = memory(50 * 4096, misaligned_by=nth)
        engine.inject_result(nth, -errno.EIO)
        with pytest.raises(OSError):
            engine.submit_read(tmp_path / "file", target).wait()
        assert engine.stats().n_in_flight_requests == 0
        target.zero_()
        engine.submit_read(tmp_path / "file", memory(4096)).wait()  # what was left behind would have come by now
        assert target.sum() == 0


def test_a_transfer_that_never_gets_anywhere_ends(engine, tmp_path: Path) -> None:
    for nth in range(1, 2000):
        engine.inject_result(nth, -errno.EAGAIN)
    with pytest.raises(OSError) as caught:
        engine.submit_write(tmp_path / "file", memory(4096)).wait()
    assert caught.value.errno == errno.EAGAIN


def test_a_device_that_refuses_direct_transfers_after_all_gets_them_through_the_page_cache(
    engine, tmp_path: Path
) -> None:
    data, target = memory(40960).copy_(some_bytes(40960)), memory(40960)
    with engine.open(tmp_path / "file", "rw") as file:
        if not file.is_direct:
            pytest.skip("no O_DIRECT here")
        engine.inject_result(3, -errno.EINVAL)
        engine.submit_write(file, data).wait()
        engine.submit_read(file, target).wait()
    assert torch.equal(target, data)
    assert engine.stats().buffered_bytes >= 40960


def test_a_handle_waits_for_all_and_tells_of_every_failure(backend: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_AIO_BACKEND", backend)
    (tmp_path / "short").write_bytes(b"abc")
    with io_op().aio_handle() as handle:
        targets = [torch.zeros(10, dtype=torch.uint8) for _ in range(4)]
        handle.async_pwrite(some_bytes(10), tmp_path / "file")
        handle.async_pread(targets[0], tmp_path / "short")
        handle.async_pread(targets[1], tmp_path / "short", 1)
        handle.async_pwrite(some_bytes(10), tmp_path / "file2")
        with pytest.raises(
            OSError, match=r"offset 0: wanted 10 bytes, got 3; .* end of file \(1 more requests failed\)"
        ) as caught:
            handle.wait()
        assert [error.got_bytes for error in caught.value.also_failed] == [2]
        assert handle.wait() == 0
        assert torch.equal(stored(tmp_path / "file2"), some_bytes(10))
        assert handle.sync_pwrite(some_bytes(10), tmp_path / "file") == 1, "the handle goes on"


def test_a_truncated_file(engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    with engine.open(path) as file:
        os.truncate(path, 50_001)
        with pytest.raises(OSError, match="got 50001; .* end of file"):
            engine.submit_read(file, memory(100_000)).wait()
        with pytest.raises(OSError, match="offset 60000: wanted 5000 bytes, got 0; .* end of file"):
            engine.submit_read(file, memory(5000), 60_000).wait()


def test_a_deleted_or_replaced_file_is_the_one_that_was_opened(engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    with engine.open(path) as file:
        path.unlink()
        path.write_bytes(b"y" * 10_000)
        target = memory(10_000)
        engine.submit_read(file, target).wait()
        assert (target == ord("x")).all()
    with pytest.raises(ValueError, match="file is closed"):
        engine.submit_read(file, target)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_cannot_be_opened_is_named(engine, operation: str, tmp_path: Path) -> None:
    submit = engine.submit_read if operation == "read" else engine.submit_write
    with pytest.raises(FileNotFoundError, match="no/such/file"):
        submit(tmp_path / "no/such/file", memory(10))
    with pytest.raises(OSError, match="Is a directory") as caught:
        submit(tmp_path, memory(10)).wait()
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(OSError, match="fd 9999"):
        submit(9999, memory(10))
    with contextlib.suppress(PermissionError):
        (tmp_path / "readonly").touch(0o400)
        if os.geteuid() != 0:
            with pytest.raises(PermissionError):
                engine.submit_write(tmp_path / "readonly", memory(10))


def test_descriptors_that_are_not_for_this(engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    reader, writer = os.pipe()
    try:
        with pytest.raises(
            OSError, match=f"write of fd {fd}, offset 0: wanted 5000 bytes, got 0; .*Bad file descriptor"
        ):
            engine.submit_write(fd, memory(5000)).wait()
        with pytest.raises(OSError, match=f"Illegal seek: 'fd {writer}'"):
            engine.submit_write(writer, memory(10), 5)
    finally:
        for descriptor in (fd, reader, writer):
            os.close(descriptor)


def test_a_full_device(engine) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="write of /dev/full, .* got 0; .*No space left on device"):
        engine.submit_write("/dev/full", memory(8192)).wait()


def test_the_limit_on_the_size_of_files(engine, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        for n_bytes in (4096, 40_000):
            with pytest.raises(OSError, match="File too large") as caught:
                engine.submit_write(tmp_path / "file", memory(n_bytes), 99_000).wait()
            assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB on a device of its own."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "mount", "umount"))):
        pytest.skip("only root can mount")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(4 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True).returncode != 0:
        pytest.skip("cannot mount here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("misaligned_by", [None, 1])
def test_a_full_disk(engine, misaligned_by: int | None, small_disk: Path) -> None:
    old = some_bytes(MIB)
    engine.submit_write(small_disk / "old", old).wait()
    with pytest.raises(OSError, match="wanted 8388608 bytes, got .*No space left on device") as caught:
        engine.submit_write(small_disk / "new", memory(8 * MIB, misaligned_by)).wait()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left on device"):  # grows what is there
        engine.submit_write(small_disk / "old", memory(8 * MIB, misaligned_by), 4096).wait()
    target = memory(4096)
    engine.submit_read(small_disk / "old", target).wait()
    assert torch.equal(target, old[:4096])


@pytest.mark.parametrize("end", ["close", "drop", "leave"])
def test_a_forked_child_is_told_and_leaves_its_parent_alone(
    backend: str, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_AIO_BACKEND", backend)
    data = some_bytes(200_000)
    handle = io_op().aio_handle(block_size=4096, queue_depth=4)
    handle.engine.inject_hold(True)
    handle.async_pwrite(data, tmp_path / "file")
    request = handle.engine.submit_write(tmp_path / "file2", data)

    def child() -> None:
        nonlocal handle, request
        for use in (
            handle.wait,
            request.wait,
            request.done,
            handle.engine.stats,
            lambda: handle.async_pwrite(data, tmp_path / "child"),
        ):
            with pytest.raises(RuntimeError, match="has inherited this I/O handle .* Make a handle after the fork"):
                use()
        if end == "close":
            handle.close()
        elif end == "drop":
            handle = request = None
            gc.collect()
        with io_op().aio_handle() as own:
            own.sync_pwrite(data, tmp_path / "own")

    in_child(child)
    handle.engine.inject_hold(False)
    assert (handle.wait(), request.wait()) == (1, 200_000)
    assert handle.sync_pwrite(data, tmp_path / "file3") == 1
    handle.close()
    for name in ("file", "file2", "file3", "own"):
        assert torch.equal(stored(tmp_path / name), data), name
    assert not (tmp_path / "child").exists()


@pytest.mark.parametrize(
    ("backend_name", "end"),
    [
        ("io_uring", "handle.engine.inject_hold(True); handle.async_pwrite(data, path)"),
        (
            "threads",
            "import threading; handle.engine.inject_hold(True); request = handle.engine.submit_write(path, data);"
            " threading.Thread(target=request.wait, daemon=True).start()",
        ),
        ("io_uring", "handle.async_pwrite(data, path); raise SystemExit(0)"),
        ("threads", "handle.async_pwrite(data, path); child = os.fork(); child and os.waitpid(child, 0)"),
    ],
    ids=["held", "waiting-thread", "exit", "forked"],
)
def test_the_interpreter_ends_with_requests_under_way(backend_name: str, end: str, tmp_path: Path) -> None:
    require_backend(backend_name)
    path = tmp_path / "file"
    result = run_python(
        f"""
        path, data = {str(path)!r}, torch.arange(3_000_000, dtype=torch.uint8)
        handle = op.aio_handle(block_size=4096, queue_depth=4)
        {end}
        """,
        DS_AIO_BACKEND=backend_name,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert torch.equal(stored(path), torch.arange(3_000_000, dtype=torch.uint8)), "what was under way is finished"


def test_ctrl_c_is_heard_while_waiting(backend: str, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with io_op().engine(backend=backend) as engine:
            engine.inject_hold(True)
            request = engine.submit_write(tmp_path / "file", some_bytes(100_000))
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(KeyboardInterrupt):
                request.wait(timeout_s=LIMIT_S)
            engine.inject_hold(False)
            assert request.wait() == 100_000
    finally:
        signal.signal(signal.SIGALRM, before)


def test_without_asserts_all_is_done_and_checked(tmp_path: Path) -> None:
    result = run_python(
        f"""
        path, data = {str(tmp_path / "file")!r}, torch.arange(100_000, dtype=torch.uint8)
        for backend in ("io_uring", "threads"):
            os.environ["DS_AIO_BACKEND"] = backend
            with op.aio_handle() as handle:
                target = torch.zeros_like(data)
                handle.async_pwrite(data, path)
                handle.wait()
                handle.async_pread(target, path)
                handle.wait()
                print(torch.equal(target, data))
                try:
                    handle.sync_pread(torch.zeros(100_001, dtype=torch.uint8), path)
                except OSError as error:
                    print(error.got_bytes)
        """,
        "-O",
    )
    assert result.stdout.split()[-4:] == ["True", "100000"] * 2, result.stdout + result.stderr


def test_without_io_uring_threads_do_it(tmp_path: Path) -> None:
    """As in a container whose filter does not allow io_uring: here the limit on descriptors forbids the ring."""
    require_backend("io_uring")

    def child() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)  # the lowest number that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(OSError) as caught:
            io_op().engine(backend="io_uring")
        assert caught.value.errno == errno.EMFILE
        engine = io_op().engine(backend="auto")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        engine.submit_write(tmp_path / "file", some_bytes(100_000)).wait()
        assert engine.stats().backend == "threads"

    in_child(child)
    assert torch.equal(stored(tmp_path / "file"), some_bytes(100_000))


def test_memory_that_may_not_be_locked_is_used_unlocked_and_told_of_once() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    from deepspeed.ops.aio import once, pinned

    def child() -> None:
        said: list[str] = []
        pinned.logger.warning = lambda message, *arguments: said.append(message % arguments)
        once._times.cache_clear()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        os.setgroups([])
        os.setresuid(65534, 65534, 65534)
        handle = io_op().aio_handle()
        for _ in range(2):
            tensor = handle.new_cpu_locked_tensor(MIB, torch.empty(0))
            assert handle.is_pinned(tensor)
            assert tensor[:9].fill_(1).sum() == 9  # few: the threads of a large sum did not survive the fork
        limit = "cannot lock 4194304 bytes of memory .*: the limit is 65536 bytes. To raise it: `ulimit -l`"
        with pytest.raises(OSError, match=limit):
            io_op().pinned_empty(MIB, torch.float32, must_lock=True)
        (line,) = said
        assert re.match(limit, line)
        assert line.endswith("Going on with memory that is not locked")

    in_child(child)


def test_what_may_still_be_locked_is_the_limit_less_what_is() -> None:
    from deepspeed.ops.aio.pinned import lockable_bytes

    def child() -> None:
        if os.getuid() == 0:
            assert lockable_bytes() is None, "no limit applies to root"
            io_op()  # loaded as long as its files can be read
            os.setresuid(65534, 65534, 65534)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * MIB, 8 * MIB))
        before_bytes = lockable_bytes()
        assert before_bytes is not None
        assert 0 <= before_bytes <= 8 * MIB
        kept = io_op().pinned_empty(before_bytes // 2, torch.uint8, must_lock=True)
        after_bytes = lockable_bytes()
        assert after_bytes is not None
        assert after_bytes <= before_bytes - len(kept)
        with pytest.raises(OSError, match="cannot lock"):
            io_op().pinned_empty(after_bytes + MIB, torch.uint8, must_lock=True)

    in_child(child)


@pytest.fixture(params=["ninja", "no ninja"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The op's library, to be compiled into a folder of its own."""
    from deepspeed.ops.op_builder import native
    from deepspeed.ops.op_builder.async_io import ASYNC_IO

    if request.param == "no ninja":
        monkeypatch.setattr(native, "_ninja", lambda: None)
    else:
        assert native._ninja() is not None
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    return ASYNC_IO


def test_a_killed_build_of_the_op_is_taken_over(library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, called, go = stuck_compiler(tmp_path, calls_with="-shared")
    monkeypatch.setenv("CXX", compiler)
    killed = os.fork()
    if killed == 0:
        with contextlib.suppress(BaseException):
            library._compiled()
        os._exit(1)
    assert called.read_text() == "compiling\n"  # blocks until the build has begun
    os.kill(killed, signal.SIGKILL)  # its compiler lives on
    os.waitpid(killed, 0)
    monkeypatch.delenv("CXX")
    began_s = time.monotonic()
    path = library._compiled()
    assert time.monotonic() - began_s < 60
    go.write_text("go\n")  # the compiler of the killed build ends now, and has nowhere to put what it made
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.setenv("CXX", "no-compiler-is-needed-any-more")
    in_child(lambda: ctypes.CDLL(str(path)).ds_aio_engine_open)


def test_a_library_is_compiled_in_a_folder_of_any_name(
    library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "a: $b 'c'"))
    assert library._compiled().exists()


def test_a_compiler_that_fails_is_quoted(library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho this compiler is too old >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match="(?s)-O2 .*this compiler is too old"):
        library.path()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not library.is_available()
    with pytest.raises(RuntimeError, match="no C.. compiler found; install g.., or name one in CXX"):
        library.path()
