"""A base release and a fork of it that are small enough to read: what the overlay's tests run on."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Mapping

BASE_FILES: Mapping[str, str] = {
    "deepspeed/__init__.py": "",
    "deepspeed/engine.py": "from .coordinator import Coordinator, drain\nfrom . import trace as t\nt.record\n",
    "deepspeed/coordinator.py": (
        "class Coordinator:\n    def __init__(self, budget, *, group=None): pass\n    def fetch(self, module): pass\n"
        "def drain(handles, wait=True): pass\ndef _unused(): pass\n"
    ),
    "deepspeed/trace.py": "record = []\nlimit = 3\n",
    "op_builder/builder.py": "class OpBuilder: pass\n",
}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_base(archive: Path, files: Mapping[str, str] = BASE_FILES) -> Path:
    """Pack `files` as a source release."""
    with tarfile.open(archive, "w:gz") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(f"toy-1.0/{path}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return archive


def write_fork(root: Path, files: Mapping[str, tuple[str, str]], base: Mapping[str, str] = BASE_FILES) -> Path:
    """Write a fork whose `files` map a path to its mode and text, with a manifest that lists them all, and its base."""
    archive = write_base(root / "toy-1.0.tar.gz", base)
    lines = ["[tool.fork]", 'base = "toy"', 'version = "1.0"', "release = 2"]
    lines.append(f'sha256 = "{hashlib.sha256(archive.read_bytes()).hexdigest()}"')
    for path, (mode, text) in files.items():
        lines += [f'[tool.fork.files."{path}"]', f'mode = "{mode}"', 'why = "a test"']
        if mode != "adds":
            lines.append(f'base_sha256 = "{sha256(base[path])}"')
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "pyproject.toml").write_text("\n".join(lines) + "\n")
    for name in ("README.md", "NOTICE"):
        (root / name).write_text(f"{name} of the fork\n")
    return archive
