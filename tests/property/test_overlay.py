"""Any fork of any base: the tree holds what the modes say, and the check notices every single change."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fork.base_release import BaseRelease
from fork.check import check
from fork.manifest import Manifest, Mode, OverlayFile, kept_base_path
from fork.tree import write_tree

NAMES = st.sampled_from(["a.py", "b.py", "zero/a.py", "zero/c.py", "swap/d.py"])
PATHS = st.builds(lambda top, name: f"{top}/{name}", st.sampled_from(["deepspeed", "op_builder", "csrc"]), NAMES)
TEXTS = st.integers(0, 9).map(lambda number: f"x = {number}\n")


@st.composite
def forks(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, tuple[Mode, str]]]:
    """Files of a base, and files over it in modes that suit, none equal to the base's."""
    base = {"deepspeed/__init__.py": "", **draw(st.dictionaries(PATHS, TEXTS, max_size=6))}
    ours: dict[str, tuple[Mode, str]] = {}
    for path in draw(st.sets(PATHS, max_size=5)):
        if path not in base:
            ours[path] = (Mode.ADDS, draw(TEXTS))
        else:
            mode = draw(st.sampled_from([Mode.REPLACES, Mode.EXTENDS]))
            mark = f"import {Path(kept_base_path(path)).stem}" if mode is Mode.EXTENDS else "# ours"
            ours[path] = (mode, f"{mark}\n{draw(TEXTS)}")
    return base, ours


def lay_out(root: Path, base: dict[str, str], ours: dict[str, tuple[Mode, str]]) -> tuple[Manifest, BaseRelease]:
    release = BaseRelease({path: text.encode() for path, text in base.items()})
    files = {}
    for path, (mode, text) in ours.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        files[path] = OverlayFile(path, mode, "a test", None if mode is Mode.ADDS else release.sha256(path))
    for name in ("README.md", "NOTICE"):
        (root / name).write_text(name)
    return Manifest("toy", "1.0", "0" * 64, 1, files), release


@settings(max_examples=100, deadline=None)
@given(fork=forks(), link=st.booleans())
def test_the_tree_is_the_base_with_the_forks_files_over_it(fork, link: bool) -> None:
    base, ours = fork
    with tempfile.TemporaryDirectory() as directory:
        root, tree = Path(directory) / "root", Path(directory) / "tree"
        root.mkdir()
        manifest, release = lay_out(root, base, ours)
        assert check(manifest, release, root) == []
        write_tree(manifest, release, root, tree, link=link)
        for path, text in base.items():
            if path not in ours:
                assert (tree / path).read_text() == text
        for path, (mode, text) in ours.items():
            for destination in manifest.files[path].destinations():
                assert (tree / destination).read_text() == text
                assert (tree / destination).is_symlink() == link
                kept = tree / kept_base_path(destination)
                assert kept.exists() == (mode is Mode.EXTENDS)
                if mode is Mode.EXTENDS:
                    assert kept.read_text() == base[path]


@settings(max_examples=100, deadline=None)
@given(fork=forks(), data=st.data())
def test_every_change_that_breaks_the_overlay_is_found(fork, data: st.DataObject) -> None:
    base, ours = fork
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        manifest, release = lay_out(root, base, ours)
        changes = ["add"] + (["remove"] if ours else [])
        changes += ["copy"] if any(mode is not Mode.ADDS for mode, _ in ours.values()) else []
        change = data.draw(st.sampled_from(changes))
        if change == "add":
            path = "deepspeed/unlisted/e.py"
            (root / path).parent.mkdir(parents=True)
            (root / path).write_text("")
        elif change == "remove":
            path = data.draw(st.sampled_from(sorted(ours)))
            (root / path).unlink()
        else:
            path = data.draw(st.sampled_from(sorted(p for p, (mode, _) in ours.items() if mode is not Mode.ADDS)))
            (root / path).write_text(base[path])
        assert [finding.path for finding in check(manifest, release, root)] == [path]
