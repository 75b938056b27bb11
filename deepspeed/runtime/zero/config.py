"""The base's ``zero_optimization`` section of a ds_config, with the keys of the fork."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.gather_mode import GatherMode
from deepspeed.runtime.zero.lockstep import DEFAULT_TIMEOUT_S
from pydantic import Field

from . import _base_config
from ._base_config import *  # noqa: F401,F403

# Checkpoints hold its members by the name of this module, which the base has too.
_base_config.ZeroStageEnum.__module__ = __name__


class DeepSpeedZeroConfig(_base_config.DeepSpeedZeroConfig):
    """See the base's for the other keys."""

    stage3_lockstep_timeout_s: float = Field(DEFAULT_TIMEOUT_S, gt=0)
    """
    How long a rank waits where it needs the others, in seconds. After that each rank that waits raises a
    `LockstepError` which says which rank is where.
    """

    stage3_gather: GatherMode = GatherMode.AUTO
    """
    ``node``: in passes without grad each rank reads the other ranks' partitions, so that it needs no other rank.
    ``collective``: all ranks gather together. ``auto``: ``node`` where that is possible.
    """


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """The section of a ds_config, validated; defaults if there is none."""
    section = param_dict.get(_base_config.ZERO_OPTIMIZATION, {})
    if isinstance(section, bool):
        section = _base_config.read_zero_config_deprecated(param_dict)
    return DeepSpeedZeroConfig(**section)
