"""What is wrong with the overlay: each finding names the file, what was expected and what to do."""

from __future__ import annotations

import ast
import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fork.base_release import BaseRelease
from fork.manifest import DESTINATIONS, Manifest, Mode, OverlayFile, kept_base_path

_NOT_SOURCE = {"__pycache__", ".mypy_cache", ".ruff_cache"}


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that the check rejects, or that a newer base release would touch."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def check(manifest: Manifest, base: BaseRelease, root: Path) -> list[Finding]:
    """Compare the files of `root` with the manifest and the base release that it pins."""
    present = overlay_paths(root)
    findings = [
        Finding(path, "not listed in [tool.fork.files]; list it with its mode and reason, or remove it")
        for path in present - set(manifest.files)
    ]
    for file in manifest.files.values():
        findings += _against_base(file, base)
        if file.path in present:
            findings += _content(file, base, (root / file.path).read_bytes())
        else:
            findings.append(Finding(file.path, "listed in [tool.fork.files] but missing; add it or drop the entry"))
    return sorted(findings)


def overlay_paths(root: Path) -> set[str]:
    """Every file below the directories that are laid over the base, relative to `root`."""
    return {
        path.relative_to(root).as_posix()
        for top in DESTINATIONS
        for path in (root / top).rglob("*")
        if path.is_file() and not _NOT_SOURCE & set(path.parts)
    }


def rebase(manifest: Manifest, newer: BaseRelease, pinned: BaseRelease) -> list[Finding]:
    """What moving the pin from `pinned` to `newer` would touch: one finding for each file that needs a look."""
    findings = []
    for file in manifest.files.values():
        if file.mode is Mode.ADDS:
            if file.path in newer:
                findings.append(Finding(file.path, "added by the fork, and the newer base has a file of this name"))
        elif file.path not in newer:
            findings.append(Finding(file.path, f"{file.mode.value} a file that the newer base no longer has"))
        elif newer.sha256(file.path) != file.base_sha256:
            added, removed = _changed_lines(pinned.read(file.path), newer.read(file.path))
            findings.append(Finding(file.path, f"{file.mode.value} a file that changed: +{added} -{removed} lines"))
    return sorted(findings)


def _against_base(file: OverlayFile, base: BaseRelease) -> list[Finding]:
    if file.mode is Mode.ADDS:
        if file.path in base:
            return [Finding(file.path, "mode adds, but the base has this file; use replaces or extends")]
        return []
    if file.path not in base:
        return [Finding(file.path, f"mode {file.mode.value}, but the base has no such file; use adds")]
    if base.sha256(file.path) != file.base_sha256:
        return [
            Finding(
                file.path,
                f"the base's file has drifted: expected sha256 {file.base_sha256}, got {base.sha256(file.path)}; "
                "look at what changed there, follow it, then record the new hash",
            )
        ]
    return []


def _content(file: OverlayFile, base: BaseRelease, content: bytes) -> list[Finding]:
    if file.path in base and hashlib.sha256(content).hexdigest() == base.sha256(file.path):
        return [Finding(file.path, "identical to the base's file; remove it")]
    if not file.path.endswith(".py"):
        return []
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        return [Finding(file.path, f"not valid Python: {error}")]
    kept = Path(kept_base_path(file.path)).stem
    if file.mode is Mode.EXTENDS and not _imports(tree, kept):
        return [Finding(file.path, f"mode extends, but it never imports {kept}; import it, or use replaces")]
    return []


def _imports(tree: ast.Module, module: str) -> bool:
    """Whether a module of this last name is imported anywhere in the source."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(name.rpartition(".")[2] == module for name in names):
                return True
    return False


def _changed_lines(old: bytes, new: bytes) -> tuple[int, int]:
    """How many lines a unified diff adds and removes."""
    before, after = (content.decode("utf-8", errors="replace").splitlines() for content in (old, new))
    diff = [line for line in difflib.unified_diff(before, after, n=0) if not line.startswith(("+++", "---"))]
    return sum(line.startswith("+") for line in diff), sum(line.startswith("-") for line in diff)
