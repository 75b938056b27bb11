"""The base's configuration of init_inference, with the keys of the fork."""

from __future__ import annotations

from enum import Enum

from pydantic import Field

from . import _base_config
from ._base_config import *  # noqa: F401,F403


class RankInputs(str, Enum):
    """What is done about the inputs of the ranks of a tensor-parallel group, which have to be the same."""

    check = "check"
    """Each forward compares a fingerprint of them, and raises an error that names the ranks where they differ."""
    broadcast = "broadcast"
    """`forward` and `generate` of the engine take what rank 0 of the group was given."""
    trust = "trust"
    """Nothing: ranks that differ give wrong results, or wait for each other for ever."""


class DeepSpeedTPConfig(_base_config.DeepSpeedTPConfig):
    """See the base's for the other keys."""

    inputs: RankInputs = RankInputs.check
    """ What is done about inputs that are not the same on every rank: `check`, `broadcast` or `trust`. """


class DeepSpeedInferenceConfig(_base_config.DeepSpeedInferenceConfig):
    """See the base's for the other keys."""

    tensor_parallel: DeepSpeedTPConfig = Field({}, alias="tp")
