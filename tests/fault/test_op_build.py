"""A killed op build is taken over, a living one is waited for, and both are said in one line."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Callable, Iterator

import psutil
import pytest

pytest.importorskip("fcntl")

# An op of one small C file, loaded the way every op is: through OpBuilder.jit_load.
LOAD = """
import sys
from deepspeed.ops.op_builder.builder import OpBuilder

class AnswerBuilder(OpBuilder):
    NAME, BUILD_VAR = "answer", "DS_BUILD_ANSWER"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return "answer_op"

    def sources(self):
        return [sys.argv[1]]

print("answer", AnswerBuilder().load().answer())
"""
SOURCE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_answer() { return PyModule_Create(&module); }
"""
# A compiler that tells one FIFO when it is called with an argument, and goes on once the other has been written to.
STUCK_COMPILER = """#!/bin/sh
case " $* " in *" {calls_with} "*)
    echo compiling > {called}
    read line < {go}
esac
exec g++ "$@"
"""
LIMIT_S = 120


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that builds and calls the op, in a process group of its own; none outlives the test."""
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    started = []

    def start_one(compiler: str = "g++", **environment: str) -> subprocess.Popen[str]:
        settings = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CXX": compiler}
        settings |= environment
        process = subprocess.Popen(
            [sys.executable, "-c", LOAD, str(source)],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    # ninja gives each compiler a process group of its own, so a stuck one has outlived its session.
    for left in psutil.process_iter(["cmdline"]):
        if any(str(tmp_path) in part for part in left.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def stuck_compiler(folder: Path, calls_with: str = "-c") -> tuple[str, Path, Path]:
    """The compiler, the FIFO that tells of its call, and the FIFO that holds it up."""
    called, go, compiler = folder / "called", folder / "go", folder / "compiler"
    os.mkfifo(called)
    os.mkfifo(go)
    compiler.write_text(STUCK_COMPILER.format(called=called, go=go, calls_with=calls_with))
    compiler.chmod(0o755)
    return str(compiler), called, go


def test_a_killed_build_is_taken_over(start, tmp_path: Path) -> None:
    compiler, called, _ = stuck_compiler(tmp_path)
    killed = start(compiler)
    assert called.read_text() == "compiling\n"  # blocks until the build has begun
    lock = tmp_path / "extensions/answer/lock"
    assert lock.exists()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=LIMIT_S)
    assert lock.exists(), "the leftover that the next process finds"

    after = start()
    printed, _ = after.communicate(timeout=LIMIT_S)
    assert after.returncode == 0, printed
    assert "answer 42" in printed
    assert printed.count("a killed build of op answer left") == 1


def test_what_a_killed_build_still_writes_does_not_reach_the_new_one(start, tmp_path: Path) -> None:
    compiler, called, go = stuck_compiler(tmp_path)
    killed = start(compiler)
    assert called.read_text() == "compiling\n"
    os.kill(killed.pid, signal.SIGKILL)  # its compiler lives on, in the build directory
    killed.wait()
    after = start()
    printed, _ = after.communicate(timeout=LIMIT_S)
    assert "answer 42" in printed, printed
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "extensions/answer").iterdir()}
    go.write_text("go\n")  # the compiler of the killed build ends now
    assert killed.stdout is not None
    killed.stdout.read()  # until it has closed its output, which it shares with the killed build
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "extensions/answer").iterdir()} == built
    assert [path.name for path in (tmp_path / "extensions").iterdir() if "killed" in path.name] == []


def test_a_build_of_another_host_is_never_taken_over(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder.build_lock import build_lock

    directory = tmp_path / "answer"
    directory.mkdir()
    (directory / "lock").touch()
    (tmp_path / "answer.deepspeed_lock").write_text("elsewhere:1")
    for _ in range(2):  # the first to come must not hide from the second that the build is elsewhere
        with build_lock("answer", directory):
            assert (directory / "lock").exists()


def test_loading_a_compiled_op_says_nothing(start) -> None:
    assert "answer 42" in start().communicate(timeout=LIMIT_S)[0]
    both = [start(), start()]
    for process in both:
        printed, _ = process.communicate(timeout=LIMIT_S)
        assert "answer 42" in printed
        assert "op answer" not in printed


@pytest.mark.skipif(
    not Path(sys.executable).with_name("ninja").exists(), reason="there is no ninja beside the interpreter"
)
def test_the_ninja_beside_the_interpreter_is_used(start, tmp_path: Path) -> None:
    """One of another version in PATH would compile again what is there, and the next process once more."""
    called = tmp_path / "called"
    other = tmp_path / "bin" / "ninja"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\ntouch {called}\nexec {Path(sys.executable).with_name("ninja")} "$@"\n')
    other.chmod(0o755)
    process = start(PATH=f"{other.parent}{os.pathsep}{os.environ['PATH']}")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert "answer 42" in output
    assert not called.exists()


def test_a_living_build_is_waited_for(start, tmp_path: Path) -> None:
    compiler, called, go = stuck_compiler(tmp_path)
    first = start(compiler)
    assert called.read_text() == "compiling\n"
    second = start()
    assert second.stdout is not None
    said = ""
    for line in second.stdout:  # until it says so, the second process has not reached the lock
        said += line
        if "waiting for it" in line:
            break
    assert f"op answer is being built by process {socket.gethostname()}:{first.pid}; waiting for it" in said
    go.write_text("go\n")
    for process in (first, second):
        printed, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, printed
        assert "answer 42" in printed
