"""C++ libraries with a plain C interface for ctypes: compiled in seconds, and in no way tied to torch or Python.

Compiled at first use into torch's extensions directory, under `build_lock`, or with the wheel (`DS_BUILD_*`). A
library's name tells what it was made of, so one that is there is right; it appears in one step, so it is whole.
"""

import hashlib
import importlib.machinery
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Tuple

from .build_lock import build_lock

COMPILE_ARGUMENTS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden")
LINK_ARGUMENTS = ("-shared", "-pthread")
_UNFINISHED_PREFIX = "unfinished-"


class NativeBuildError(RuntimeError):
    """The compiler failed; the message has its command and what it said."""


@dataclass(frozen=True)
class NativeLibrary:
    """One library. `module` is where a wheel has it, `sources` are relative to the folder that holds csrc."""

    name: str
    module: str
    sources: Tuple[str, ...]
    headers: Tuple[str, ...] = ()

    def is_available(self) -> bool:
        return self.installed() is not None or (sys.platform == "linux" and compiler() is not None)

    def path(self) -> Path:
        """The library, compiled now if need be."""
        return self.installed() or self._compiled()

    def installed(self) -> Optional[Path]:
        """The library that came with the wheel, or None."""
        folder, stem = self.module.split(".")[2:-1], self.module.rpartition(".")[2]
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            # Where this package lies in an installation is deepspeed/ops/op_builder.
            candidate = Path(__file__).parent.parent.joinpath(*folder, stem + suffix)
            if candidate.exists():
                return candidate
        return None

    def extension(self):
        """What setuptools compiles into a wheel."""
        from setuptools import Extension

        return Extension(
            self.module,
            sources=list(self.sources),
            extra_compile_args={"cxx": list(COMPILE_ARGUMENTS)},
            extra_link_args=["-pthread"],
            language="c++",
        )

    def _compiled(self) -> Path:
        from torch.utils.cpp_extension import _get_build_directory

        command = self._command()
        directory = Path(_get_build_directory(self.name, verbose=False))
        library = directory / f"lib{self.name}-{self._fingerprint(command)}.so"
        if not library.exists():
            with build_lock(self.name, directory):
                # Whoever waited finds it made. `build_lock` may have moved the directory of a killed build away.
                directory.mkdir(parents=True, exist_ok=True)
                if not library.exists():
                    _compile(command, directory, library)
        return library

    def _command(self) -> List[str]:
        found = compiler()
        if found is None:
            raise NativeBuildError(f"op {self.name}: no C++ compiler found; install g++, or name one in CXX")
        return [*found, *COMPILE_ARGUMENTS, *LINK_ARGUMENTS, *map(str, map(_absolute, self.sources))]

    def _fingerprint(self, command: List[str]) -> str:
        digest = hashlib.sha256(repr(command[: -len(self.sources)]).encode())
        for path in (*self.sources, *self.headers):
            digest.update(_absolute(path).read_bytes())
        return digest.hexdigest()[:16]


def compiler() -> Optional[List[str]]:
    """The compiler's command: `CXX`, or the first of the usual names that is installed."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else (["c++"], ["g++"], ["clang++"]):
        if shutil.which(command[0]) is not None:
            return command
    return None


def _absolute(path: str) -> Path:
    return Path(__file__).parent.parent / path


def _compile(command: List[str], directory: Path, library: Path) -> None:
    # A folder of its own for each attempt: the compiler of a killed one may still be writing.
    for leftover in directory.glob(f"{_UNFINISHED_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=_UNFINISHED_PREFIX) as folder:
        made = Path(folder) / library.name
        result = subprocess.run(
            [*command, "-o", str(made)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode != 0:
            raise NativeBuildError(f"{shlex.join(command)}\nended with status {result.returncode}:\n{result.stdout}")
        made.replace(library)
