"""The source release that the fork builds on: getting its archive, and reading files out of it."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Iterator, Mapping

from fork.errors import BaseReleaseError
from fork.manifest import Manifest

ARCHIVE_VARIABLE = "DEEPSPEED_BASE_SDIST"


class BaseRelease:
    """The regular files of a source release, by path relative to its top directory.

    The whole archive is held in memory (12 MB for DeepSpeed): the check, the contract and the tree all read from it,
    and none of them should depend on what an earlier, interrupted unpacking left on disk.
    """

    def __init__(self, files: Mapping[str, bytes], executable: frozenset[str] = frozenset()):
        self._files = dict(files)
        self._executable = executable

    @classmethod
    def from_archive(cls, archive: Path) -> BaseRelease:
        """Read a `.tar.gz`. Raises BaseReleaseError when it is unreadable or has a path outside its top directory."""
        files: dict[str, bytes] = {}
        executable = set()
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    _, _, path = member.name.partition("/")
                    if member.isdir():
                        continue
                    if not member.isfile() or not path or ".." in path.split("/") or member.name.startswith("/"):
                        raise BaseReleaseError(f"{archive}: unexpected member {member.name!r}; not a source release")
                    stream = tar.extractfile(member)
                    files[path] = stream.read() if stream else b""
                    if member.mode & 0o100:
                        executable.add(path)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise BaseReleaseError(f"{archive}: cannot be read as a source release: {error}") from None
        return cls(files, frozenset(executable))

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files))

    def read(self, path: str) -> bytes:
        """The content of one file. Raises KeyError when the release has none of this name."""
        return self._files[path]

    def sha256(self, path: str) -> str:
        return hashlib.sha256(self._files[path]).hexdigest()

    def unpack(self, directory: Path) -> None:
        """Write every file below `directory`. Raises OSError."""
        for path, content in self._files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755 if path in self._executable else 0o644)


def pinned_archive(manifest: Manifest, root: Path) -> Path:
    """The archive of the pinned release: the one named by DEEPSPEED_BASE_SDIST, the cached one, or a new download.

    Downloads are cached in `root`/build/base; where that cannot be written the archive stays in a temporary directory
    that is removed when the process ends. Raises BaseReleaseError.
    """
    named = os.environ.get(ARCHIVE_VARIABLE)
    if named:
        archive = Path(named)
        if not archive.is_file():
            # pip runs a build in the source's directory, not where it was called.
            where = "" if archive.is_absolute() else f" in {Path.cwd()}; give an absolute path"
            raise BaseReleaseError(f"{ARCHIVE_VARIABLE}={named}: no such file{where}")
        got = _sha256_of(archive)
        if got != manifest.base_sha256:
            expected = manifest.base_sha256
            raise BaseReleaseError(f"{ARCHIVE_VARIABLE}={named}: wrong sha256: expected {expected}, got {got}")
        return archive

    cache = root / "build" / "base"
    cached = cache / f"{manifest.base}-{manifest.base_version}.tar.gz"
    if cached.is_file():
        if _sha256_of(cached) == manifest.base_sha256:
            return cached
        print(f"fork: {cached} is unreadable, damaged or of another release; fetching it anew", file=sys.stderr)

    try:
        downloaded = download(manifest.base, manifest.base_version, manifest.base_sha256)
    except BaseReleaseError as error:
        remedy = f"set {ARCHIVE_VARIABLE}=/path/to/{cached.name} to build without an index"
        raise BaseReleaseError(f"{error}; {remedy}") from None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Another build may be doing the same: write beside the name, then rename, so that nobody reads half a file.
        with tempfile.NamedTemporaryFile(dir=cache, prefix=".download-", delete=False) as partial:
            partial.write(downloaded.read_bytes())
        Path(partial.name).chmod(0o644)
        Path(partial.name).replace(cached)
    except OSError as error:
        print(f"fork: {cache} cannot be written ({error.strerror}); the base archive is not cached", file=sys.stderr)
        return downloaded
    return cached


def download(name: str, version: str, sha256: str | None = None) -> Path:
    """Fetch a source release with pip, from whatever index pip is configured for, into a temporary directory.

    pip itself checks `sha256` before it runs anything of the release. Raises BaseReleaseError.
    """
    directory = Path(_process_lifetime_directory())
    requirement = directory / "requirement.txt"
    requirement.write_text(f"{name}=={version}" + (f" --hash=sha256:{sha256}\n" if sha256 else "\n"), encoding="utf-8")
    # pip asks the release for its metadata after the download, and that runs its setup.py. The switches that a user
    # sets to compile ops are meant for the build, not for this, and so is what the pip that called us tells its hooks.
    not_for_it = ("DS_BUILD", "_PYPROJECT_HOOKS_", "PEP517_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(not_for_it)}
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", ":all:", "--dest", str(directory), "--requirement", str(requirement)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BaseReleaseError(f"cannot fetch {name}=={version} from the package index: {_pip_reason(result.stderr)}")
    archives = list(directory.glob("*.tar.gz"))
    if len(archives) != 1:
        raise BaseReleaseError(f"pip fetched {len(archives)} archives for {name}=={version}, expected one .tar.gz")
    return archives[0]


def _pip_reason(stderr: str) -> str:
    """The line of pip's output that says what went wrong."""
    got = re.search(r"Got\s+([0-9a-f]{64})", stderr)
    expected = re.search(r"Expected sha256 ([0-9a-f]{64})", stderr)
    if got and expected:
        return f"wrong sha256: expected {expected[1]}, got {got[1]}"
    if "No module named pip" in stderr:
        return "pip is not installed in this environment"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if "[end of output]" in lines[1:]:  # what a failed setup.py said last
        return lines[lines.index("[end of output]") - 1]
    errors = [line.partition(":")[2].strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1]


def _process_lifetime_directory() -> str:
    directory = tempfile.mkdtemp(prefix="deepspeed-base-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _sha256_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"none, it cannot be read ({error.strerror})"
