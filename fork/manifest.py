"""The `[tool.fork]` table of pyproject.toml: which release the fork builds on, and every file laid over it."""

from __future__ import annotations

import enum
import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Mapping

from fork.errors import ManifestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Where a directory of the repository lands in the source tree. The base's source release carries its C++ sources and
# op builders twice: `setup.py` reads the first copy, the installed package the second.
DESTINATIONS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": ("deepspeed",),
    "csrc": ("csrc", "deepspeed/ops/csrc"),
    "op_builder": ("op_builder", "deepspeed/ops/op_builder"),
}

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Mode(enum.Enum):
    """What a file of the fork does to the base release."""

    ADDS = "adds"
    """The base has no file of this name."""

    REPLACES = "replaces"
    """Ours is installed, the base's is not."""

    EXTENDS = "extends"
    """Ours is installed, and the base's stays beside it as `_base_<name>.py`, for ours to import."""


@dataclass(frozen=True)
class OverlayFile:
    """One file of the fork. `path` is relative to the repository root, with forward slashes."""

    path: str
    mode: Mode
    why: str
    base_sha256: str | None = None
    drops: frozenset[str] = frozenset()
    """Public methods, as `Class.method`, that the base's class has and ours gives up, since nobody calls them."""

    def destinations(self) -> list[str]:
        """The places that this file takes in the source tree."""
        top, _, rest = self.path.partition("/")
        return [f"{directory}/{rest}" for directory in DESTINATIONS[top]]


@dataclass(frozen=True)
class Manifest:
    """The pinned base release, the fork's own release number, and the files by path."""

    base: str
    base_version: str
    base_sha256: str
    release: int
    files: Mapping[str, OverlayFile]

    @property
    def local_version(self) -> str:
        """The local version segment that marks the fork, for example `z3.1` (PEP 440)."""
        return f"z3.{self.release}"

    @property
    def version(self) -> str:
        return f"{self.base_version}+{self.local_version}"


def kept_base_path(path: str) -> str:
    """Where the base's version of an extended file is kept: `a/b.py` -> `a/_base_b.py`."""
    posix = PurePosixPath(path)
    return str(posix.with_name(f"_base_{posix.name}"))


def load_manifest(root: Path) -> Manifest:
    """Read and validate `[tool.fork]` of `root`/pyproject.toml. Raises ManifestError."""
    path = root / "pyproject.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; run from the repository root") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: not valid TOML: {error}") from None
    tool = document.get("tool")
    if not isinstance(tool, Mapping) or "fork" not in tool:
        raise ManifestError(f"{path}: has no [tool.fork] table")
    return parse_manifest(tool["fork"])


def parse_manifest(table: Mapping[str, Any]) -> Manifest:
    """Validate the `[tool.fork]` table. Raises ManifestError naming the key, what was expected and what was found."""
    _reject_unknown(table, {"base", "version", "sha256", "release", "files"}, "[tool.fork]")
    release = table.get("release")
    if not isinstance(release, int) or isinstance(release, bool) or release < 1:
        raise ManifestError(f"[tool.fork] release: expected a whole number from 1, got {release!r}")
    files = table.get("files", {})
    if not isinstance(files, Mapping):
        raise ManifestError(f"[tool.fork] files: expected tables by path, got {files!r}")
    return Manifest(
        base=_string(table, "base", "[tool.fork]"),
        base_version=_string(table, "version", "[tool.fork]"),
        base_sha256=_sha256(table, "sha256", "[tool.fork]"),
        release=release,
        files={path: parse_file(path, entry) for path, entry in files.items()},
    )


def parse_file(path: str, entry: Mapping[str, Any]) -> OverlayFile:
    """Validate one entry of `[tool.fork.files]`. Raises ManifestError."""
    where = f'[tool.fork.files."{path}"]'
    _reject_unknown(entry, {"mode", "why", "base_sha256", "drops"}, where)
    _reject_bad_path(path, where)
    try:
        mode = Mode(entry.get("mode"))
    except ValueError:
        expected = " | ".join(mode.value for mode in Mode)
        raise ManifestError(f"{where} mode: expected {expected}, got {entry.get('mode')!r}") from None
    if mode is Mode.EXTENDS and not path.endswith(".py"):
        raise ManifestError(f"{where} mode: only a Python module can be extended; use replaces")
    drops = entry.get("drops", [])
    if not isinstance(drops, list) or not all(isinstance(name, str) for name in drops):
        raise ManifestError(f"{where} drops: expected a list of Class.method, got {drops!r}")
    if mode is Mode.ADDS:
        if drops:
            raise ManifestError(f"{where} drops: an added file has no base file; remove the key")
        if "base_sha256" in entry:
            raise ManifestError(f"{where} base_sha256: an added file has no base file; remove the key")
        return OverlayFile(path, mode, _string(entry, "why", where))
    sha256 = _sha256(entry, "base_sha256", where)
    return OverlayFile(path, mode, _string(entry, "why", where), sha256, frozenset(drops))


def _reject_bad_path(path: str, where: str) -> None:
    parts = path.split("/")
    if parts[0] not in DESTINATIONS or len(parts) < 2 or not all(parts) or {".", ".."} & set(parts) or "\\" in path:
        expected = ", ".join(f"{top}/" for top in DESTINATIONS)
        raise ManifestError(f"{where}: expected a plain path below {expected}, got {path!r}")
    if parts[-1].startswith("_base_"):
        raise ManifestError(f"{where}: names with the prefix _base_ are kept for the base's own files")
    if path == "deepspeed/__init__.py":
        raise ManifestError(f"{where}: would make the repository's partial tree importable; extend a submodule instead")


def _reject_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise ManifestError(f"{where}: expected a table, got {table!r}")
    unknown = sorted(set(table) - known)
    if unknown:
        raise ManifestError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(sorted(known))}")


def _string(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ManifestError(f"{where} {key}: expected text, got {value!r}")
    return value


def _sha256(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ManifestError(f"{where} {key}: expected 64 lower-case hexadecimal digits, got {value!r}")
    return value
