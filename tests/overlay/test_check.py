"""`python -m fork check` and `rebase`: each kind of wrong file is rejected, by name, and a right overlay is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fork.__main__ import main
from tests.overlay.toy_fork import BASE_FILES, sha256, write_base, write_fork

GOOD = {
    "deepspeed/node_store.py": ("adds", "shards = {}\n"),
    "deepspeed/coordinator.py": (
        "replaces",
        "class Coordinator:\n    def __init__(self, budget, *, group=None, store=None): ...\n"
        "    def fetch(self, module): ...\n"
        "def drain(handles, wait=True): ...\n",
    ),
    "deepspeed/trace.py": ("extends", "from ._base_trace import *\nlimit = 4\n"),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fork that the check accepts, as the current directory."""
    monkeypatch.setenv("DEEPSPEED_BASE_SDIST", str(write_fork(tmp_path, GOOD)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must find something; give what it printed."""
    assert main(list(arguments) or ["check"]) == 1
    return capsys.readouterr().out


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_right_overlay_is_accepted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert capsys.readouterr().out == "3 files lie as they should over toy 1.0\n"


def test_an_unlisted_file_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "csrc/aio").mkdir(parents=True)
    (root / "csrc/aio/engine.cpp").write_text("int main() {}\n")
    assert "csrc/aio/engine.cpp: not listed" in rejected(capsys)


def test_compiled_python_is_not_a_file_of_the_overlay(root: Path) -> None:
    (root / "deepspeed/__pycache__").mkdir()
    (root / "deepspeed/__pycache__/trace.cpython-311.pyc").write_bytes(b"")
    assert main(["check"]) == 0


def test_a_missing_file_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "deepspeed/node_store.py").unlink()
    assert "deepspeed/node_store.py: listed in [tool.fork.files] but missing" in rejected(capsys)


def test_a_file_that_equals_the_bases_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "deepspeed/coordinator.py").write_text(BASE_FILES["deepspeed/coordinator.py"])
    assert "deepspeed/coordinator.py: identical to the base's file" in rejected(capsys)


def test_a_drifted_base_file_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, wrong = sha256(BASE_FILES["deepspeed/trace.py"]), "0" * 64
    edit(root / "pyproject.toml", recorded, wrong)
    assert f"deepspeed/trace.py: the base's file has drifted: expected sha256 {wrong}, got {recorded}" in rejected(
        capsys
    )


def test_a_file_that_adds_what_the_base_has_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "deepspeed/engine.py").write_text("mine = 1\n")
    with (root / "pyproject.toml").open("a") as file:
        file.write('[tool.fork.files."deepspeed/engine.py"]\nmode = "adds"\nwhy = "a test"\n')
    assert "deepspeed/engine.py: mode adds, but the base has this file" in rejected(capsys)


def test_a_file_that_replaces_what_the_base_lacks_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hash_line = f'base_sha256 = "{"0" * 64}"'
    edit(root / "pyproject.toml", 'mode = "adds"', f'mode = "replaces"\n{hash_line}')
    assert "deepspeed/node_store.py: mode replaces, but the base has no such file" in rejected(capsys)


def test_an_extension_that_never_imports_the_base_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "deepspeed/trace.py").write_text("record = []\nlimit = 4\n")
    assert "deepspeed/trace.py: mode extends, but it never imports _base_trace" in rejected(capsys)


def test_a_comment_is_no_import(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "deepspeed/trace.py").write_text("# unlike _base_trace\nrecord = []\n")
    assert "deepspeed/trace.py: mode extends, but it never imports _base_trace" in rejected(capsys)


def test_a_file_that_is_not_python_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "deepspeed/node_store.py").write_text("shards = {\n")
    assert "deepspeed/node_store.py: not valid Python: '{' was never closed" in rejected(capsys)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def drain(handles, wait=True)", "def empty(handles)", "does not define drain"),
        ("def drain(handles, wait=True)", "def drain(handles)", "expected parameter 2 to be 'wait', got nothing"),
        ("def drain(handles, wait=True)", "def drain(handles, wait)", "expected 'wait' to be optional"),
        ("def drain(handles, wait=True)", "def drain(items, wait=True)", "parameter 1 to be 'handles', got 'items'"),
        ("group=None, store=None", "store=None", "Coordinator.__init__: expected the keyword 'group'"),
        ("def fetch(self, module)", "def get(self, module)", "Coordinator does not define fetch"),
    ],
)
def test_a_broken_contract_is_rejected(
    root: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    edit(root / "deepspeed/coordinator.py", old, new)
    printed = rejected(capsys)
    assert message in printed
    assert "needed by the base in deepspeed/engine.py:1" in printed


def test_a_method_that_is_listed_as_dropped_may_be_gone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root / "deepspeed/coordinator.py", "def fetch(self, module)", "def get(self, module)")
    listed = '[tool.fork.files."deepspeed/coordinator.py"]\n'
    edit(root / "pyproject.toml", listed, listed + 'drops = ["Coordinator.release"]\n')
    assert "Coordinator does not define fetch" in rejected(capsys)
    edit(root / "pyproject.toml", "Coordinator.release", "Coordinator.fetch")
    assert main(["check"]) == 0


def test_an_added_file_drops_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = '[tool.fork.files."deepspeed/node_store.py"]\n'
    edit(root / "pyproject.toml", listed, listed + 'drops = ["Store.put"]\n')
    assert main(["check"]) != 0
    assert "drops: an added file has no base file" in "".join(capsys.readouterr())


def test_a_name_used_through_an_imported_module_is_part_of_the_contract(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(root / "deepspeed/trace.py", "import *", "import limit as _limit")
    assert "deepspeed/trace.py: does not define record (needed by the base in deepspeed/engine.py:3)" in rejected(
        capsys
    )


def test_rebase_reports_what_a_newer_base_touches(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    newer = dict(BASE_FILES)
    newer["deepspeed/trace.py"] += "depth = 1\n"
    newer["deepspeed/node_store.py"] = "theirs = 1\n"
    newer["deepspeed/engine.py"] += "from .coordinator import _unused\n"
    archive = write_base(tmp_path / "toy-1.1.tar.gz", newer)
    printed = rejected(capsys, "rebase", str(archive))
    assert "deepspeed/trace.py: extends a file that changed: +1 -0 lines" in printed
    assert "deepspeed/node_store.py: added by the fork, and the newer base has a file of this name" in printed
    assert "deepspeed/coordinator.py: does not define _unused" in printed
    assert main(["check"]) == 0, "rebase only reports"


def test_rebase_reports_a_file_that_is_gone(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    newer = {path: text for path, text in BASE_FILES.items() if path != "deepspeed/coordinator.py"}
    printed = rejected(capsys, "rebase", str(write_base(tmp_path / "toy-2.0.tar.gz", newer)))
    assert "deepspeed/coordinator.py: replaces a file that the newer base no longer has" in printed


def test_rebase_on_the_same_release_finds_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rebase", str(root / "toy-1.0.tar.gz")]) == 0
    assert "changes none of the 3 files" in capsys.readouterr().out


def test_entry_gives_the_table_to_list_a_file_with(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["entry", "deepspeed/engine.py", "--mode", "extends"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:2] == ['[tool.fork.files."deepspeed/engine.py"]', 'mode = "extends"']
    assert sha256(BASE_FILES["deepspeed/engine.py"]) in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["entry", "deepspeed/none.py", "--mode", "extends"], "mode extends, but the base has no such file"),
        (["entry", "deepspeed/engine.py", "--mode", "adds"], "mode adds, but the base has such a file"),
        (["entry", "/etc/passwd"], "expected a plain path below deepspeed/"),
        (["rebase", "none.tar.gz"], "none.tar.gz: no such file"),
        (["rebase", "README.md"], "expected a version such as 0.20.0, or the path of a .tar.gz, got 'README.md'"),
    ],
)
def test_a_command_that_makes_no_sense_ends_with_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1


def test_a_relative_archive_is_told_where_it_was_looked_for(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEED_BASE_SDIST", "none.tar.gz")
    assert main(["check"]) == 2
    assert f"no such file in {root}; give an absolute path" in capsys.readouterr().err


def test_a_wrong_archive_ends_the_check_with_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "toy-1.0.tar.gz").write_bytes(b"something else")
    assert main(["check"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_this_repository_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert main(["check"]) == 0, capsys.readouterr().out
