"""What this installation of DeepSpeed is: the fork's version, its base release, and the files that differ.

>>> import deepspeed
>>> deepspeed.fork_info.load().base_version
'0.19.8'
"""

import functools
import json
import multiprocessing
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

_MANIFEST = Path(__file__).with_name("fork_manifest.json")


@dataclass(frozen=True)
class ForkFile:
    """One file of the fork: `mode` is adds, replaces or extends (what it does to the base's), `why` the reason."""

    path: str
    mode: str
    why: str


@dataclass(frozen=True)
class ForkInfo:
    """The pinned base release (name, version, sha256 of its archive) and the fork's files by path."""

    version: str
    base: str
    base_version: str
    base_sha256: str
    files: Mapping[str, ForkFile]

    def summary(self) -> str:
        """One line: version, base, and how many files differ in which way."""
        counts = Counter(file.mode for file in self.files.values())
        changes = ", ".join(f"{mode} {counts[mode]}" for mode in ("replaces", "extends", "adds") if counts[mode])
        base = f"{self.base} {self.base_version}"
        return f"DeepSpeed {self.version}: a fork of {base} ({changes} files; ds_report lists them)"


@functools.lru_cache(maxsize=1)
def load() -> ForkInfo:
    """Read the manifest that the build wrote beside this module. Raises RuntimeError if the installation lacks it."""
    try:
        content = json.loads(_MANIFEST.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{_MANIFEST}: expected the manifest written by the build, got: {error}; install the package again with pip"
        ) from error
    # The version as installed: DS_BUILD_STRING can have put something between the base's and the fork's.
    from .git_version_info import version

    content["version"] = version
    files = {path: ForkFile(path, entry["mode"], entry["why"]) for path, entry in content.pop("files").items()}
    return ForkInfo(files=files, **content)


def announce() -> None:
    """Tell an interactive user, on stderr, what was imported. Programs and ranks import in silence."""
    interactive = sys.argv[:1] in ([""], ["-c"]) and multiprocessing.parent_process() is None
    if not interactive or "RANK" in os.environ:
        return
    try:
        print(load().summary(), file=sys.stderr)
    except RuntimeError as error:
        print(f"DeepSpeed: {error}", file=sys.stderr)
