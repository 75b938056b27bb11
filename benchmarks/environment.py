"""An environment under measurement: its interpreter, the releases in it, and the folder of its compiled ops."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROBED_PACKAGES = ("deepspeed", "torch", "transformers")
SHARED_PACKAGES = ("torch", "transformers")
"""What both environments must have in the same release for their figures to be comparable."""
PROBE = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
def release(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None
packages = {package: release(package) for package in sys.argv[1:]}
print(json.dumps({"prefix": sys.prefix, "python": platform.python_version(), "packages": packages}))
"""
PROBE_LIMIT_S = 60


@dataclass(frozen=True)
class Environment:
    """What one of the two interpreters is."""

    label: str
    interpreter: Path
    prefix: Path
    python: str
    releases: dict[str, str]

    @property
    def extensions_dir(self) -> Path:
        """Where this environment keeps the ops that it compiles for the benchmarks; removed with it."""
        return self.prefix / "benchmark-extensions"

    def variables(self) -> dict[str, str]:
        """The variables of a rank process, less those of its rank.

        PYTHONPATH would mix the environments; the interpreter's own folder comes first in PATH for its ninja.
        """
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return variables | {
            "PATH": os.pathsep.join([str(self.interpreter.parent), variables.get("PATH", os.defpath)]),
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(self.extensions_dir),
        }

    @staticmethod
    def probe(label: str, interpreter: Path) -> Environment:
        """Asks an interpreter what it has; raises `ValueError` when it cannot run or lacks a package."""
        # The link itself is kept, not what it points to: through it the interpreter finds its environment.
        interpreter = interpreter.absolute()
        try:
            answer = subprocess.run(
                [interpreter, "-I", "-c", PROBE, *PROBED_PACKAGES],
                check=True,
                capture_output=True,
                text=True,
                timeout=PROBE_LIMIT_S,
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"--{label} {interpreter}: not a Python interpreter that runs: {error}") from error
        facts = json.loads(answer)
        missing = [package for package, release in facts["packages"].items() if release is None]
        if missing:
            raise ValueError(
                f"--{label} {interpreter}: {', '.join(missing)} not installed there; `make bench` sets both up"
            )
        return Environment(label, interpreter, Path(facts["prefix"]), facts["python"], facts["packages"])


def require_comparable(fork: Environment, base: Environment) -> None:
    """Raises `ValueError` when something other than DeepSpeed differs between the environments."""
    differing = [
        f"{package} {fork.releases[package]} and {base.releases[package]}"
        for package in SHARED_PACKAGES
        if fork.releases[package] != base.releases[package]
    ]
    if fork.python != base.python:
        differing.append(f"Python {fork.python} and {base.python}")
    if differing:
        raise ValueError(
            f"the environments of fork and base differ by more than deepspeed: {'; '.join(differing)}; "
            "remove them and let `make bench` install both from the same constraints"
        )


@contextmanager
def own_extensions(environments: Sequence[Environment]) -> Iterator[None]:
    """Makes this process the only user of the environments' op folders, and removes what a killed build left there.

    torch marks a folder in which it builds with a file `lock` and waits for ever for one that nobody removes. While
    this process holds the folders, no build is under way in them, so every such file is stale. Raises `RuntimeError`
    when another run holds one of the folders.
    """
    with ExitStack() as stack:
        for folder in sorted({environment.extensions_dir.resolve() for environment in environments}):
            folder.mkdir(parents=True, exist_ok=True)
            holder = stack.enter_context((folder / "owner").open("w"))
            try:
                fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(f"another benchmark run uses {folder}; wait for it or end it") from None
            for lock in folder.glob("**/lock"):
                lock.unlink()
        yield
