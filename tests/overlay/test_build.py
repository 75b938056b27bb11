"""The distribution that pip builds: the base's, file by file, with the fork's files in their places, from any start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from fork.backend import source_files
from fork.base_release import pinned_archive
from fork.manifest import Mode, kept_base_path, load_manifest

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = load_manifest(ROOT)


def pip(*arguments: str | Path, python: str | Path = sys.executable, **environment: str) -> str:
    """Run pip, which must succeed; give what it printed."""
    result = run_pip(*arguments, python=python, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def run_pip(
    *arguments: str | Path, python: str | Path = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, **environment}, cwd="/", capture_output=True, text=True, check=False
    )


def only_wheel(directory: Path) -> zipfile.ZipFile:
    (wheel,) = directory.glob("*.whl")
    return zipfile.ZipFile(wheel)


def payload(wheel: zipfile.ZipFile) -> set[str]:
    """The files of a wheel, with the version taken out of the names."""
    return {re.sub(r"^deepspeed-[^/]*\.(data|dist-info)/", r"\1/", name) for name in wheel.namelist()}


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


@pytest.fixture(scope="module")
def archive() -> Path:
    return pinned_archive(MANIFEST, ROOT)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository's files, without git, that a test may write to."""
    copy = tmp_path_factory.mktemp("checkout") / "fork"
    for path in source_files(ROOT):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    return copy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("fork-wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, ROOT)
    return only_wheel(directory)


@pytest.fixture(scope="module")
def base_wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("base-wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, archive)
    return only_wheel(directory)


def test_the_wheel_holds_the_bases_files_and_the_forks(wheel: zipfile.ZipFile, base_wheel: zipfile.ZipFile) -> None:
    added = {"deepspeed/fork_manifest.json", "dist-info/licenses/NOTICE"}
    for file in MANIFEST.files.values():
        installed = [path for path in file.destinations() if path.startswith("deepspeed/")]
        added.update(installed if file.mode is Mode.ADDS else [])
        added.update(map(kept_base_path, installed) if file.mode is Mode.EXTENDS else [])
    assert payload(wheel) - payload(base_wheel) == added
    assert payload(base_wheel) <= payload(wheel)


def test_the_forks_files_are_installed_and_the_bases_are_kept_beside_extensions(
    wheel: zipfile.ZipFile, base_wheel: zipfile.ZipFile
) -> None:
    for file in MANIFEST.files.values():
        for path in file.destinations():
            if not path.startswith("deepspeed/"):
                continue
            assert wheel.read(path) == (ROOT / file.path).read_bytes()
            if file.mode is Mode.EXTENDS:
                assert wheel.read(kept_base_path(path)) == base_wheel.read(path)


def test_dependencies_and_extras_are_the_bases(wheel: zipfile.ZipFile, base_wheel: zipfile.ZipFile) -> None:
    ours, theirs = metadata(wheel), metadata(base_wheel)
    assert (ours["Name"], ours["Version"]) == ("deepspeed", MANIFEST.version)
    for field in ("Requires-Dist", "Provides-Extra"):
        assert sorted(ours.get_all(field, [])) == sorted(theirs.get_all(field, []))
    assert ours.get_payload() == (ROOT / "README.md").read_text()


def test_an_sdist_builds_the_same_wheel_in_an_isolated_environment_without_torch(
    wheel: zipfile.ZipFile, archive: Path, tmp_path: Path
) -> None:
    script = "import sys; from fork.backend import build_sdist; print(build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.name == f"deepspeed-{MANIFEST.version}.tar.gz"
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"PKG-INFO", "pyproject.toml", *MANIFEST.files} <= names
    assert "version.txt" not in names, "files of the base are not ours to distribute"
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, sdist, DEEPSPEED_BASE_SDIST=str(archive))
    assert payload(only_wheel(tmp_path)) == payload(wheel)


@pytest.fixture
def index(archive: Path, tmp_path: Path) -> dict[str, str]:
    """Settings with which pip takes a folder of archives for its index."""
    folder = tmp_path / "index"
    folder.mkdir()
    shutil.copy(archive, folder / f"deepspeed-{MANIFEST.base_version}.tar.gz")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_git_url_fetches_the_base_and_builds_a_wheel_that_names_the_commit(
    index: dict[str, str], tmp_path: Path
) -> None:
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], text=True).strip()
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    pip("wheel", *options, f"git+file://{ROOT}", **index)
    assert f"git_hash='{commit}'" in only_wheel(tmp_path).read("deepspeed/git_version_info_installed.py").decode()


def test_a_damaged_cached_archive_is_replaced(
    archive: Path, index: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEPSPEED_BASE_SDIST", raising=False)
    for name, value in index.items():
        monkeypatch.setenv(name, value)
    cached = tmp_path / f"build/base/deepspeed-{MANIFEST.base_version}.tar.gz"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(archive.read_bytes()[:1000])
    assert pinned_archive(MANIFEST, tmp_path) == cached
    assert cached.read_bytes() == archive.read_bytes()
    assert cached.stat().st_mode & 0o777 == 0o644, "another user of the checkout can read it"


def test_an_editable_install_is_live_and_importable_from_the_repository_root(
    checkout: Path, archive: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    # The suite's own environment stays reachable for torch; its fork must not be found before the one under test.
    python = tmp_path / "bin/python"
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    ours = subprocess.check_output(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    options = ["--no-deps", "--no-build-isolation", "--prefix", tmp_path, "--ignore-installed"]
    pip("install", *options, "--editable", checkout, DEEPSPEED_BASE_SDIST=str(archive))
    (Path(purelib.strip()) / "zz_suite.pth").write_text(ours)

    show = "import deepspeed; print(deepspeed.__version__, deepspeed.fork_info.load().base_version, deepspeed.__file__)"
    for directory in (checkout, tmp_path):
        version, base_version, file = subprocess.check_output([python, "-c", show], cwd=directory, text=True).split()
        assert (version, base_version) == (MANIFEST.version, MANIFEST.base_version)
        assert Path(file).is_relative_to(checkout / "build/editable")
    with (checkout / "deepspeed/fork_info.py").open("a") as module:
        module.write("\nEDITED = 'just now'\n")
    edited = "import deepspeed; print(deepspeed.fork_info.EDITED)"
    assert subprocess.check_output([python, "-c", edited], cwd=checkout, text=True).endswith("just now\n")
    assert (tmp_path / "bin/ds_report").exists()


def errors_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines by which the fork's build explained itself, without a traceback among them."""
    printed = result.stdout + result.stderr
    assert result.returncode != 0
    assert "Traceback" not in printed, printed
    return [line.strip() for line in printed.splitlines() if line.strip().startswith("error: ") and "/" in line]


BUILD = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir")


def test_a_wrong_hash_is_one_line(checkout: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "deepspeed-0.19.8.tar.gz"
    wrong.write_bytes(b"not the release")
    (line,) = errors_of(run_pip(*BUILD, tmp_path, checkout, DEEPSPEED_BASE_SDIST=str(wrong)))
    assert f"wrong sha256: expected {MANIFEST.base_sha256}, got " in line


def test_a_named_archive_that_is_not_there_is_one_line(checkout: Path, tmp_path: Path) -> None:
    (line,) = errors_of(run_pip(*BUILD, tmp_path, checkout, DEEPSPEED_BASE_SDIST=str(tmp_path / "none.tar.gz")))
    assert line.endswith("none.tar.gz: no such file")


def test_no_index_is_one_line_with_the_remedy(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / "build", ignore_errors=True)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    (line,) = errors_of(run_pip(*BUILD, tmp_path, checkout, **offline))
    assert "cannot fetch deepspeed==0.19.8 from the package index: " in line
    assert "set DEEPSPEED_BASE_SDIST=" in line


def test_an_op_switch_without_torch_is_one_line(checkout: Path, archive: Path, tmp_path: Path) -> None:
    """An isolated environment has no torch, whatever the environment that pip runs in has."""
    switch = {"DS_BUILD_OPS": "1", "DEEPSPEED_BASE_SDIST": str(archive)}
    result = run_pip("wheel", "--no-deps", "--wheel-dir", tmp_path, checkout, **switch)
    assert result.returncode != 0
    assert "error: DS_BUILD_OPS=1: compiling ops needs torch in the build environment" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_a_tree_that_cannot_be_written_can_be_installed_but_not_linked(
    checkout: Path, archive: Path, tmp_path: Path
) -> None:
    """The tests may run as root, whom permissions do not stop, so a file stands where a directory would be made."""
    shutil.rmtree(checkout / "build", ignore_errors=True)
    (checkout / "build").write_text("")
    install = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--no-build-isolation", "--target", tmp_path]
    try:
        assert f"Would install deepspeed-{MANIFEST.version}" in pip(
            *install, checkout, DEEPSPEED_BASE_SDIST=str(archive)
        )
        install.remove("--dry-run")
        (line,) = errors_of(run_pip(*install, "--editable", checkout, DEEPSPEED_BASE_SDIST=str(archive)))
        assert "cannot be written" in line
        assert "an editable install needs a writable checkout" in line
    finally:
        (checkout / "build").unlink()


def test_linking_again_leaves_sources_as_old_as_they_are(checkout: Path, archive: Path) -> None:
    """Or every op would be compiled anew."""

    def link() -> int:
        command = [sys.executable, "-m", "fork", "link"]
        environment = {**os.environ, "DEEPSPEED_BASE_SDIST": str(archive)}
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        return (checkout / "build" / "editable" / "csrc" / "cpu" / "comm" / "shm.cpp").stat().st_mtime_ns

    try:
        assert link() == link()
    finally:
        shutil.rmtree(checkout / "build")


@pytest.mark.slow
def test_an_op_can_be_compiled_with_the_wheel(archive: Path, tmp_path: Path) -> None:
    pip(*BUILD, tmp_path, ROOT, DS_BUILD_SHM_COMM="1", DEEPSPEED_BASE_SDIST=str(archive))
    compiled = [name for name in only_wheel(tmp_path).namelist() if name.endswith(".so")]
    assert any("deepspeed_shm_comm_op" in name for name in compiled)


@pytest.mark.slow
def test_the_io_op_of_a_wheel_needs_no_compiler(archive: Path, tmp_path: Path) -> None:
    pip(*BUILD, tmp_path, ROOT, DS_BUILD_AIO="1", DEEPSPEED_BASE_SDIST=str(archive))
    only_wheel(tmp_path).extractall(tmp_path / "installed")
    show = (
        "from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder\n"
        "for builder in AsyncIOBuilder(), PinMemoryBuilder():\n"
        "    print(builder.is_compatible(), builder.load()._library.path.name)\n"
    )
    # Without site-packages' .pth files, which lead to an editable install.
    site = subprocess.check_output(
        [sys.executable, "-c", "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"], text=True
    ).strip()
    settings = {"PYTHONPATH": f"{tmp_path / 'installed'}:{site}", "CXX": "none", "RANK": "0", "DS_ACCELERATOR": "cpu"}
    printed = subprocess.check_output([sys.executable, "-S", "-c", show], env={**os.environ, **settings}, text=True)
    assert [line.split(".")[0] for line in printed.splitlines()] == ["True async_io_op", "True pin_memory_op"]
