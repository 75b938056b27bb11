"""Op builders that survive a killed build: the base's, with every build at first use under `build_lock`."""

import functools
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from . import _base_builder
from ._base_builder import *  # noqa: F401,F403
from ._base_builder import OpBuilder
from .build_lock import build_lock


@contextmanager
def _own_programs_first():
    """Have torch find the ninja beside this interpreter, whether its folder is in PATH or not.

    Another version of ninja does not understand the log of the first, and compiles everything again.
    """
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _one_build_at_a_time(jit_load):

    @functools.wraps(jit_load)
    def locked(self, verbose=True):
        from torch.utils.cpp_extension import _get_build_directory

        directory = Path(_get_build_directory(self.name, verbose=False))
        with build_lock(self.name, directory), _own_programs_first():
            return jit_load(self, verbose)

    return locked


# The builders of the base derive from the base's class, so a subclass here would reach none of them. Wrapped twice
# (this module reloaded), a process would wait for itself.
if not hasattr(OpBuilder.jit_load, "__wrapped__"):
    _base_builder.OpBuilder.jit_load = _one_build_at_a_time(OpBuilder.jit_load)
