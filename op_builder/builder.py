"""Op builders that survive a killed build: the base's, with every build at first use under `build_lock`."""

import functools
from pathlib import Path

from . import _base_builder
from ._base_builder import *  # noqa: F401,F403
from ._base_builder import OpBuilder
from .build_lock import build_lock


def _one_build_at_a_time(jit_load):

    @functools.wraps(jit_load)
    def locked(self, verbose=True):
        from torch.utils.cpp_extension import _get_build_directory

        with build_lock(self.name, Path(_get_build_directory(self.name, verbose=False))):
            return jit_load(self, verbose)

    return locked


# The builders of the base derive from the base's class, so a subclass here would reach none of them. Wrapped twice
# (this module reloaded), a process would wait for itself.
if not hasattr(OpBuilder.jit_load, "__wrapped__"):
    _base_builder.OpBuilder.jit_load = _one_build_at_a_time(OpBuilder.jit_load)
