"""The source tree that is built: the base release with the fork's files laid over it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fork.base_release import BaseRelease
from fork.errors import ManifestError, TreeError
from fork.manifest import Manifest, Mode, OverlayFile, kept_base_path

# Read by deepspeed/fork_info.py of the installed package.
INSTALLED_MANIFEST = "deepspeed/fork_manifest.json"

# Files about the project that take the place of the base's: the README becomes the distribution's description, and
# setuptools puts LICENSE* and NOTICE* into its metadata.
HOUSE_FILES = ("README.md", "NOTICE")


def write_tree(manifest: Manifest, base: BaseRelease, root: Path, directory: Path, *, link: bool) -> None:
    """Write the tree to build from into `directory`, which must not exist yet or be empty.

    With `link` the fork's files are symbolic links into `root`, so that an edit there is live. Raises TreeError, and
    ManifestError for a listed file that is not there.
    """
    try:
        base.unpack(directory)
        for file in manifest.files.values():
            _lay(file, base, root, directory, link=link)
        for name in HOUSE_FILES:
            shutil.copyfile(root / name, directory / name)
        # Read by the base's setup.py, which appends it to the version.
        (directory / "build.txt").write_text(f"+{manifest.local_version}", encoding="utf-8")
        content = json.dumps(installed_manifest(manifest), indent=2) + "\n"
        (directory / INSTALLED_MANIFEST).write_text(content, encoding="utf-8")
    except OSError as error:
        raise TreeError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None


def installed_manifest(manifest: Manifest) -> dict[str, object]:
    """What the installed package knows of its making."""
    return {
        "version": manifest.version,
        "base": manifest.base,
        "base_version": manifest.base_version,
        "base_sha256": manifest.base_sha256,
        "files": {file.path: {"mode": file.mode.value, "why": file.why} for file in manifest.files.values()},
    }


def _lay(file: OverlayFile, base: BaseRelease, root: Path, directory: Path, *, link: bool) -> None:
    source = root / file.path
    if not source.is_file():
        raise ManifestError(f"{source}: listed in [tool.fork.files] but not there; run `python -m fork check`")
    for destination in file.destinations():
        target = directory / destination
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.mode is Mode.EXTENDS:
            (directory / kept_base_path(destination)).write_bytes(base.read(file.path))
        target.unlink(missing_ok=True)
        if link:
            target.symlink_to(source.resolve())
        else:
            shutil.copyfile(source, target)
