"""The maintainer's commands: `python -m fork check | rebase | link | entry`, from the repository root."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from fork.base_release import BaseRelease, download, pinned_archive
from fork.check import Finding, check, rebase
from fork.contract import contract_findings
from fork.errors import BaseReleaseError, ForkError, ManifestError
from fork.manifest import Manifest, Mode, load_manifest, parse_file


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit status: 0 nothing found, 1 findings, 2 the command could not be carried out."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fork", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("check", help="reject wrong files and broken contracts with the base")
    command.set_defaults(command=_check)

    command = commands.add_parser("rebase", help="report what a newer base release would touch; changes nothing")
    command.add_argument("version", help="a version on the package index (0.20.0), or the path of its .tar.gz")
    command.set_defaults(command=_rebase)

    command = commands.add_parser("link", help="lay an editable install anew, after adding or removing a file")
    command.set_defaults(command=_link)

    command = commands.add_parser("entry", help="print the table to list a file with in pyproject.toml")
    command.add_argument("path", help="the file, relative to the repository root")
    modes = [mode.value for mode in Mode]
    command.add_argument("--mode", choices=modes, help="default: adds, or replaces if the base has the file")
    command.set_defaults(command=_entry)
    return parser


def _this_fork() -> tuple[Path, Manifest, BaseRelease]:
    """The repository that is the current directory, its manifest, and the base release that it pins."""
    root = Path.cwd()
    manifest = load_manifest(root)
    return root, manifest, BaseRelease.from_archive(pinned_archive(manifest, root))


def _check(options: argparse.Namespace) -> int:
    root, manifest, base = _this_fork()
    findings = check(manifest, base, root)
    # A contract can only be read from files that are there and are Python.
    if not findings:
        findings = contract_findings(manifest, base, root)
    when_none = f"{len(manifest.files)} files lie as they should over {manifest.base} {manifest.base_version}"
    return _report(findings, when_none)


def _rebase(options: argparse.Namespace) -> int:
    root, manifest, pinned = _this_fork()
    # What a newer base changes can only be told of an overlay that is right over this one.
    findings = check(manifest, pinned, root)
    if findings:
        return _report(findings, "")
    newer = BaseRelease.from_archive(_newer_archive(manifest, options.version))
    findings = rebase(manifest, newer, pinned)
    gone = {finding.path for finding in findings if "no longer has" in finding.problem}
    if not gone:
        findings += contract_findings(manifest, newer, root)
    return _report(findings, f"{manifest.base} {options.version} changes none of the {len(manifest.files)} files")


def _newer_archive(manifest: Manifest, version: str) -> Path:
    if version.endswith(".tar.gz"):
        if not Path(version).is_file():
            raise BaseReleaseError(f"{version}: no such file")
        return Path(version)
    if not re.fullmatch(r"\d+(\.\w+)+", version):
        raise BaseReleaseError(f"expected a version such as 0.20.0, or the path of a .tar.gz, got {version!r}")
    return download(manifest.base, version)


def _link(options: argparse.Namespace) -> int:
    # Needs setuptools, which the other commands do without.
    from fork.backend import link_editable_tree

    print(f"laid {link_editable_tree()}")
    return 0


def _entry(options: argparse.Namespace) -> int:
    _, _, base = _this_fork()
    in_base = options.path in base
    mode = Mode(options.mode or ("replaces" if in_base else "adds"))
    if in_base == (mode is Mode.ADDS):
        has = "has such a file" if in_base else "has no such file"
        raise ManifestError(f"{options.path}: mode {mode.value}, but the base {has}")
    entry = {"mode": mode.value, **({"base_sha256": base.sha256(options.path)} if in_base else {})}
    parse_file(options.path, {**entry, "why": "to be written"})
    print(f'[tool.fork.files."{options.path}"]')
    print("\n".join(f'{key} = "{value}"' for key, value in entry.items()))
    print('why = ""')
    return 0


def _report(findings: list[Finding], when_none: str) -> int:
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings" if findings else when_none)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
