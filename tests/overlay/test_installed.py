"""The installed fork says what it is, and a user's programs are not disturbed by it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from fork.manifest import load_manifest
from fork.tree import installed_manifest

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = load_manifest(ROOT)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env={**clean, "DS_ACCELERATOR": "cpu", **environment}, capture_output=True, text=True, check=True
    )


def test_the_installed_manifest_is_this_repositorys() -> None:
    import deepspeed

    info = deepspeed.fork_info.load()
    assert deepspeed.__version__ == MANIFEST.version
    assert (info.version, info.base_version, info.base_sha256) == (
        MANIFEST.version,
        MANIFEST.base_version,
        MANIFEST.base_sha256,
    )
    listed = installed_manifest(MANIFEST)["files"]
    assert {path: {"mode": file.mode, "why": file.why} for path, file in info.files.items()} == listed


def test_an_interactive_import_tells_on_stderr_that_this_is_the_fork() -> None:
    result = python("-c", "import deepspeed")
    assert result.stdout == ""
    assert f"DeepSpeed {MANIFEST.version}: a fork of deepspeed {MANIFEST.base_version}" in result.stderr


def test_a_program_and_a_rank_import_in_silence(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import deepspeed\n")
    assert "a fork of" not in python(str(program)).stderr
    assert "a fork of" not in python("-c", "import deepspeed", RANK="0").stderr


def test_ds_report_names_version_base_and_every_file() -> None:
    report = python(str(Path(sys.executable).with_name("ds_report")), "--hide_operator_status").stdout
    assert f"version ............... {MANIFEST.version}" in report
    assert f"deepspeed {MANIFEST.base_version} (sha256 {MANIFEST.base_sha256})" in report
    for path in MANIFEST.files:
        assert path in report
    assert "DeepSpeed general environment info" in report
    for path in ("I/O engine", "io_uring", "O_DIRECT", "shared memory", "/dev/shm", "GPU"):
        assert re.search(rf"^{path} \.* (yes|no) \(.+\)$", report, re.MULTILINE)
    assert re.search(r"^I/O engine \.* yes", report, re.MULTILINE)
    assert re.search(r"^shared memory \.* yes", report, re.MULTILINE)


def test_ds_report_keeps_the_bases_options() -> None:
    from deepspeed import _base_env_report, env_report

    for name in ("main", "cli_main", "op_report", "debug_report", "parse_arguments"):
        assert callable(getattr(env_report, name))
    assert env_report.op_report is _base_env_report.op_report
