"""One rank process of a case: measures, and writes its figures or its failure to a JSON file.

Started by `benchmarks.launch` with the interpreter of the environment under measurement, as a script, so that neither
the repository root nor this folder is on the module path: the partial `deepspeed/` and `op_builder/` of the
repository must stay out of the base's sight.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_ROOT = str(_FOLDER.parent)
sys.path[:] = [_ROOT, *(entry for entry in sys.path if entry not in (_ROOT, str(_FOLDER)))]

import benchmarks  # noqa: E402, F401 (once imported, its modules are found through it and not through sys.path)

sys.path.remove(_ROOT)

from benchmarks import case  # noqa: E402
from benchmarks.figure import Figure  # noqa: E402

ORPHAN_MARGIN_S = 30.0
"""How long after its time limit a rank whose launcher was killed ends by itself."""


def main() -> int:
    """Returns the exit status: 1 where the case raised, which the result file then tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", required=True, help="module that defines CASE")
    parser.add_argument("--result", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--scratch", required=True, type=Path)
    parser.add_argument("--time-limit-s", required=True, type=float)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()

    faulthandler.enable()  # the launcher ends a rank that hangs with SIGABRT, and so learns where it was
    faulthandler.dump_traceback_later(arguments.time_limit_s + ORPHAN_MARGIN_S, exit=True)
    rank = case.Rank(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        quick=arguments.quick,
        scratch_dir=arguments.scratch,
    )
    figures: list[Figure] = []
    failure: str | None = None
    try:
        figures = case.load(arguments.module).measure(rank)
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    report = {"failure": failure, "figures": [figure.to_json() for figure in figures]}
    unfinished = arguments.result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(report))
    unfinished.replace(arguments.result)
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
