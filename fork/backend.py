"""The PEP 517 and PEP 660 build backend: every hook builds the source tree and hands over to setuptools there.

Each hook runs in a process of its own, as the standard prescribes, so changing the directory is safe.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, TypeVar

# The legacy flavour puts the tree's directory on sys.path, where the base's setup.py looks for its op builders.
from setuptools.build_meta import __legacy__ as setuptools_backend
from setuptools.warnings import SetuptoolsWarning

from fork.base_release import BaseRelease, pinned_archive
from fork.errors import ForkError, TreeError
from fork.manifest import Manifest, load_manifest
from fork.tree import write_tree

ROOT = Path(__file__).resolve().parent.parent
EDITABLE_TREE = ROOT / "build" / "editable"

_OP_SWITCH = r"DS_BUILD_(?!STRING)\w+"

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = Optional[Dict[str, Any]]
Hook = TypeVar("Hook", bound=Callable[..., Any])


def one_line_errors(hook: Hook) -> Hook:
    """End the build with the one line of a ForkError in place of a traceback through pip."""

    @functools.wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except ForkError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from None

    return wrapper  # type: ignore[return-value]


def build_string(given: str, local_version: str) -> str:
    """What the base's setup.py is to append to its version, for a DS_BUILD_STRING that the user gave.

    The mark of the fork always stays: `.dev1` -> `.dev1+z3.1`, `+cu118` -> `+z3.1.cu118`.
    """
    public, _, local = given.strip().partition("+")
    return f"{public}+{local_version}" + (f".{local}" if local else "")


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    return []


get_requires_for_build_sdist = get_requires_for_build_wheel
get_requires_for_build_editable = get_requires_for_build_wheel


@one_line_errors
def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: ConfigSettings = None) -> str:
    destination = str(Path(metadata_directory).resolve())
    with temporary_tree(), _ops_left_for_the_build():
        return setuptools_backend.prepare_metadata_for_build_wheel(destination, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


@one_line_errors
def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    _require_torch_for_ops()
    destination = str(Path(wheel_directory).resolve())
    with temporary_tree():
        return setuptools_backend.build_wheel(destination, config_settings)


@one_line_errors
def build_editable(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    _require_torch_for_ops()
    destination = str(Path(wheel_directory).resolve())
    # setuptools' default is an import hook that runs after sys.path has been searched; from the repository root that
    # search would find the fork's partial deepspeed/ first, as a namespace package. `compat` writes a .pth instead.
    settings = {"editable_mode": "compat", **(config_settings or {})}
    with _editable_tree_held():
        link_editable_tree()
        with _building_in(EDITABLE_TREE, load_manifest(ROOT)):
            return setuptools_backend.build_editable(destination, settings)


@one_line_errors
def build_sdist(sdist_directory: str, config_settings: ConfigSettings = None) -> str:
    """The fork's own files; the base release is fetched again where the sdist is built."""
    manifest = load_manifest(ROOT)
    top = f"{manifest.base}-{manifest.version}"
    with tempfile.TemporaryDirectory() as metadata_directory:
        info = Path(metadata_directory) / prepare_metadata_for_build_wheel(metadata_directory)
        package_info = (info / "METADATA").read_bytes()
    archive = Path(sdist_directory) / f"{top}.tar.gz"
    # Neither gzip's header nor the files' times should make an sdist depend on when it was built.
    with gzip.GzipFile(archive, "wb", mtime=0) as compressed, tarfile.open(fileobj=compressed, mode="w") as tar:
        for path in source_files(ROOT):
            tar.add(ROOT / path, arcname=f"{top}/{path}", recursive=False, filter=_anonymous)
        member = tarfile.TarInfo(f"{top}/PKG-INFO")
        member.size = len(package_info)
        tar.addfile(member, io.BytesIO(package_info))
    return archive.name


def source_files(root: Path) -> list[str]:
    """What belongs into an sdist: git's list in a checkout, else (in an unpacked sdist) every file but build output."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (root / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(listing, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            return sorted(path for path in set(listed.stdout.split("\0")) if path and (root / path).is_file())
    hidden = {entry.name for entry in root.iterdir() if entry.name.startswith(".")}
    skipped = {"build", "dist", "__pycache__", "PKG-INFO"} | (hidden - {".ci", ".github", ".gitignore"})
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in files if not skipped & set(path.parts))


@contextlib.contextmanager
def temporary_tree() -> Iterator[Path]:
    """A fresh tree, as the current directory. Nothing of an earlier or interrupted build can get into the wheel."""
    manifest = load_manifest(ROOT)
    base = BaseRelease.from_archive(pinned_archive(manifest, ROOT))
    with tempfile.TemporaryDirectory(prefix="deepspeed-tree-") as directory:
        write_tree(manifest, base, ROOT, Path(directory), link=False)
        with _building_in(Path(directory), manifest):
            yield Path(directory)


def link_editable_tree() -> Path:
    """Lay build/editable anew: the base release with links to the fork's files. Raises ForkError.

    The tree is written beside its name and renamed, so that a tree of this name is always whole.
    """
    manifest = load_manifest(ROOT)
    base = BaseRelease.from_archive(pinned_archive(manifest, ROOT))
    partial, old = EDITABLE_TREE.with_name("editable.partial"), EDITABLE_TREE.with_name("editable.old")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        write_tree(manifest, base, ROOT, partial, link=True)
        if EDITABLE_TREE.is_dir():
            _keep_version(EDITABLE_TREE, partial)
            _keep_times(EDITABLE_TREE, partial)
            EDITABLE_TREE.replace(old)
        partial.replace(EDITABLE_TREE)
    except OSError as error:
        raise _unwritable(error) from None
    shutil.rmtree(old, ignore_errors=True)
    return EDITABLE_TREE


def _keep_version(tree: Path, next_tree: Path) -> None:
    """The version that the base's setup.py wrote when ``tree`` was installed."""
    written = tree / "deepspeed" / "git_version_info_installed.py"
    if written.is_file():
        shutil.copyfile(written, next_tree / "deepspeed" / written.name)


def _keep_times(tree: Path, next_tree: Path) -> None:
    """Sources that have not changed are as old as they were: ops that were compiled from them stay valid."""
    for path in next_tree.rglob("*"):
        before = tree / path.relative_to(next_tree)
        are_files = all(each.is_file() and not each.is_symlink() for each in (path, before))
        if are_files and path.read_bytes() == before.read_bytes():
            times = before.stat()
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@contextlib.contextmanager
def _editable_tree_held() -> Iterator[None]:
    """Keep two editable installs from one checkout apart; the second waits for the first. Raises TreeError."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    try:
        EDITABLE_TREE.parent.mkdir(parents=True, exist_ok=True)
        lock = EDITABLE_TREE.with_name("editable.lock").open("w")
    except OSError as error:
        raise _unwritable(error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(error: OSError) -> TreeError:
    reason = error if isinstance(error, TreeError) else f"{EDITABLE_TREE}: cannot be written: {error.strerror}"
    return TreeError(f"{reason}; an editable install needs a writable checkout, `pip install .` does not")


def _require_torch_for_ops() -> None:
    """Raise ForkError where an op is to be compiled and torch is out of reach, as in pip's isolated environments."""
    asked = [key for key, value in os.environ.items() if re.fullmatch(_OP_SWITCH, key) and value not in ("", "0")]
    if asked and importlib.util.find_spec("torch") is None:
        raise ForkError(
            f"{asked[0]}={os.environ[asked[0]]}: compiling ops needs torch in the build environment, and it is not "
            "there; install torch and call pip with --no-build-isolation"
        )


@contextlib.contextmanager
def _building_in(tree: Path, manifest: Manifest) -> Iterator[None]:
    """The directory and the environment in which the base's setup.py does what it does in a checkout of its own."""
    environment = {}
    if os.environ.get("DS_BUILD_STRING"):
        environment["DS_BUILD_STRING"] = build_string(os.environ["DS_BUILD_STRING"], manifest.local_version)
    if (ROOT / ".git").exists():
        # setup.py records the commit that it finds from its own directory, and the tree lies outside the checkout.
        environment["GIT_DIR"] = str(ROOT / ".git")
    with _environment(environment), _directory(tree), warnings.catch_warnings():
        # A thousand lines on how the base declares its packages, which whoever installs the fork cannot act on.
        warnings.simplefilter("ignore", SetuptoolsWarning)
        yield


@contextlib.contextmanager
def _ops_left_for_the_build() -> Iterator[None]:
    """Metadata does not depend on the ops, and asking for them twice would compile nothing but warn twice."""
    with _environment({key: "0" for key in os.environ if re.fullmatch(_OP_SWITCH, key)}):
        yield


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member
