"""C++ libraries with a plain C interface for ctypes: compiled in seconds, and in no way tied to torch or Python.

Compiled at first use into torch's extensions directory, under `build_lock`, or with the wheel (`DS_BUILD_*`): by ninja,
several sources at once, or without it by one call of the compiler. A library's name tells what it was made of, so one
that is there is right; it appears in one step, so it is whole.
"""

import hashlib
import importlib.machinery
import os
import re
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

        found = compiler()
        if found is None:
            raise NativeBuildError(f"op {self.name}: no C++ compiler found; install g++, or name one in CXX")
        directory = Path(_get_build_directory(self.name, verbose=False))
        library = directory / f"lib{self.name}-{self._fingerprint(found)}.so"
        if not library.exists():
            with build_lock(self.name, directory):
                # Whoever waited finds it made. `build_lock` may have moved the directory of a killed build away.
                directory.mkdir(parents=True, exist_ok=True)
                if not library.exists():
                    _compile(found, [_absolute(source) for source in self.sources], directory, library)
        return library

    def _fingerprint(self, found: List[str]) -> str:
        digest = hashlib.sha256(repr([*found, *COMPILE_ARGUMENTS, *LINK_ARGUMENTS]).encode())
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


def _ninja() -> Optional[str]:
    """The one beside this interpreter, or else the first in PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("ninja", path=places)


def _compile(found: List[str], sources: List[Path], directory: Path, library: Path) -> None:
    # A folder of its own for each attempt: the compilers of a killed one may still be writing.
    for leftover in directory.glob(f"{_UNFINISHED_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=_UNFINISHED_PREFIX) as folder:
        made = Path(folder) / library.name
        ninja = _ninja()
        if ninja is None:
            command = [*found, *COMPILE_ARGUMENTS, *LINK_ARGUMENTS, *map(str, sources), "-o", str(made)]
        else:
            (Path(folder) / "build.ninja").write_text(_ninja_file(found, sources, library.name), encoding="utf-8")
            jobs = os.environ.get("MAX_JOBS", "")  # as torch reads it
            command = [ninja, "-C", folder, *(["-j", jobs] if jobs.isdigit() else [])]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            raise NativeBuildError(f"{shlex.join(command)}\nended with status {result.returncode}:\n{result.stdout}")
        made.replace(library)


def _ninja_file(found: List[str], sources: List[Path], library_name: str) -> str:
    """Each source compiled by itself, and all of them linked."""
    command = shlex.join(found).replace("$", "$$")
    objects = [f"{number}-{source.stem}.o" for number, source in enumerate(sources)]
    rules = {
        "compile": f"{command} {shlex.join(COMPILE_ARGUMENTS)} -c $in -o $out",
        "link": f"{command} {shlex.join(LINK_ARGUMENTS)} $in -o $out",
    }
    lines = [line for name, rule in rules.items() for line in (f"rule {name}", f"  command = {rule}")]
    lines += [f"build {made}: compile {_in_ninja(str(source))}" for made, source in zip(objects, sources)]
    lines += [f"build {_in_ninja(library_name)}: link {' '.join(map(_in_ninja, objects))}", ""]
    return "\n".join(lines)


def _in_ninja(path: str) -> str:
    return re.sub(r"([$ :])", r"$\1", path)
