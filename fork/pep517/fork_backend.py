"""The name under which pip finds the build backend.

pip looks up every top-level import of a build in `backend-path` first. Were that the repository root, the base's
setup.py would import `op_builder` from the fork's partial directory of that name; this folder holds nothing else.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fork.backend import *  # noqa: E402,F403
