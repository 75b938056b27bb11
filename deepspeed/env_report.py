"""`ds_report`: the base's report of ops and environment, headed by what the fork is, what works, and its files."""

import textwrap

from . import _base_env_report, fork_info, path_report
from ._base_env_report import *  # noqa: F401,F403

_MODES = {"replaces": "replaces the base's", "extends": "extends the base's", "adds": "is new"}


def fork_report() -> None:
    """Print version and base, which of the fork's paths work here, and each of its files with the reason for it."""
    info = fork_info.load()
    print("-" * 80)
    print("DeepSpeed fork")
    print("-" * 80)
    print(f"version ............... {info.version}")
    print(f"base release .......... {info.base} {info.base_version} (sha256 {info.base_sha256})")
    for path in path_report.reports():
        print(f"{path.name} {'.' * (22 - len(path.name))} {'yes' if path.works else 'no'} ({path.detail})")
    for file in sorted(info.files.values(), key=lambda file: (list(_MODES).index(file.mode), file.path)):
        print(f"{file.path} {_MODES[file.mode]}")
        print(textwrap.indent(textwrap.fill(file.why, 76), "    "))


def main(hide_operator_status=False, hide_errors_and_warnings=False):
    fork_report()
    _base_env_report.main(hide_operator_status, hide_errors_and_warnings)


def cli_main():
    arguments = _base_env_report.parse_arguments()
    main(
        hide_operator_status=arguments.hide_operator_status, hide_errors_and_warnings=arguments.hide_errors_and_warnings
    )


if __name__ == "__main__":
    cli_main()
