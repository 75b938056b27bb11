"""The name under which pip finds the build backend.

pip looks up every top-level import of a build in `backend-path` first. Were that the repository root, the base's
setup.py would import `op_builder` from the fork's partial directory of that name; this folder holds nothing else.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    from fork.backend import *  # noqa: F403
except ModuleNotFoundError as error:
    # pip installs what `build-system.requires` asks for, unless --no-build-isolation leaves that to the caller.
    remedy = "pip install -U setuptools wheel packaging tomli"
    print(f"error: the build environment is too old or incomplete ({error}); run: {remedy}", file=sys.stderr)
    raise SystemExit(1) from None
