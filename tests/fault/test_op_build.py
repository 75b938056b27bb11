"""A killed op build is taken over, a living one is waited for, and both are said in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
# A compiler that tells one FIFO when it is to compile, and does so once the other has been written to.
STUCK_COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
    echo compiling > {called}
    read line < {go}
esac
exec g++ "$@"
"""
LIMIT_S = 120


@pytest.fixture
def op(tmp_path: Path) -> Path:
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    return source


def start(op: Path, compiler: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(op.parent / "extensions")}
    if compiler is not None:
        environment["CXX"] = str(compiler)
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(op)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def stuck_compiler(folder: Path) -> tuple[Path, Path, Path]:
    """The compiler, the FIFO that tells of its call, and the FIFO that holds it up."""
    called, go, compiler = folder / "called", folder / "go", folder / "compiler"
    os.mkfifo(called)
    os.mkfifo(go)
    compiler.write_text(STUCK_COMPILER.format(called=called, go=go))
    compiler.chmod(0o755)
    return compiler, called, go


def test_a_killed_build_is_taken_over(op: Path) -> None:
    compiler, called, _ = stuck_compiler(op.parent)
    killed = start(op, compiler)
    assert called.read_text() == "compiling\n"  # blocks until the build has begun
    lock = op.parent / "extensions/answer/lock"
    assert lock.exists()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=LIMIT_S)
    assert lock.exists(), "the leftover that the next process finds"

    after = start(op)
    printed, _ = after.communicate(timeout=LIMIT_S)
    assert after.returncode == 0, printed
    assert "answer 42" in printed
    assert printed.count("a killed build of op answer left") == 1


def test_a_living_build_is_waited_for(op: Path) -> None:
    compiler, called, go = stuck_compiler(op.parent)
    first = start(op, compiler)
    assert called.read_text() == "compiling\n"
    second = start(op)
    assert second.stdout is not None
    said = ""
    for line in second.stdout:  # until it says so, the second process has not reached the lock
        said += line
        if "waiting for it" in line:
            break
    assert f"op answer is being built by process {first.pid}; waiting for it" in said
    go.write_text("go\n")
    for process in (first, second):
        printed, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, printed
        assert "answer 42" in printed
