"""`[tool.fork]` is validated once, and each mistake in it is named."""

from __future__ import annotations

from typing import Any

import pytest

from fork.backend import build_string
from fork.errors import ManifestError
from fork.manifest import Mode, kept_base_path, parse_manifest


def table(**changes: Any) -> dict[str, Any]:
    """A valid table, with changes."""
    return {"base": "deepspeed", "version": "0.19.8", "sha256": "a" * 64, "release": 1, "files": {}, **changes}


def one_file(path: str = "deepspeed/a.py", **entry: Any) -> dict[str, Any]:
    return table(files={path: {"mode": "adds", "why": "a reason", **entry}})


def test_the_version_carries_the_release_of_the_fork() -> None:
    assert parse_manifest(table(release=7)).version == "0.19.8+z3.7"


def test_an_entry_becomes_a_file_with_its_mode_and_reason() -> None:
    manifest = parse_manifest(one_file("csrc/aio/a.cpp", mode="replaces", base_sha256="b" * 64))
    file = manifest.files["csrc/aio/a.cpp"]
    assert (file.mode, file.why, file.base_sha256) == (Mode.REPLACES, "a reason", "b" * 64)
    assert file.destinations() == ["csrc/aio/a.cpp", "deepspeed/ops/csrc/aio/a.cpp"]


def test_the_bases_file_is_kept_beside_an_extension() -> None:
    assert kept_base_path("deepspeed/runtime/engine.py") == "deepspeed/runtime/_base_engine.py"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (table(release=0), "release: expected a whole number from 1, got 0"),
        (table(release=True), "release: expected a whole number from 1, got True"),
        (table(sha256="abc"), "sha256: expected 64 lower-case hexadecimal digits, got 'abc'"),
        (table(base=""), "base: expected text, got ''"),
        (table(colour="blue"), "unknown key 'colour'"),
        (one_file(mode="patches"), "mode: expected adds | replaces | extends, got 'patches'"),
        (one_file(why=" "), "why: expected text, got ' '"),
        (one_file(reason="x"), "unknown key 'reason'"),
        (one_file(base_sha256="a" * 64), "an added file has no base file"),
        (one_file(mode="replaces"), "base_sha256: expected 64 lower-case hexadecimal digits, got None"),
        (one_file("csrc/a.cpp", mode="extends", base_sha256="a" * 64), "only a Python module can be extended"),
        (one_file("tests/a.py"), "expected a plain path below deepspeed/, csrc/, op_builder/, got 'tests/a.py'"),
        (one_file("deepspeed/../setup.py"), "expected a plain path"),
        (one_file("deepspeed//a.py"), "expected a plain path"),
        (one_file("/deepspeed/a.py"), "expected a plain path"),
        (one_file("deepspeed/_base_a.py"), "names with the prefix _base_"),
        (one_file("deepspeed/__init__.py"), "would make the repository's partial tree importable"),
        (table(files={"deepspeed/a.py": "adds"}), "expected a table, got 'adds'"),
        (table(files=3), "files: expected tables by path, got 3"),
    ],
)
def test_a_mistake_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse_manifest(wrong)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "+z3.1"), (".dev20261130", ".dev20261130+z3.1"), ("+cu118", "+z3.1.cu118"), ("rc1+local", "rc1+z3.1.local")],
)
def test_a_users_build_string_keeps_the_mark_of_the_fork(given: str, expected: str) -> None:
    assert build_string(given, "z3.1") == expected
