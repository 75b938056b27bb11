"""The base's offload sections of a ds_config, with the keys of the fork, and refused early where they cannot work."""

from __future__ import annotations

from typing import Any, Union

from deepspeed.runtime.config_utils import pp_int
from pydantic import Field, model_validator

from . import _base_offload_config
from ._base_offload_config import *  # noqa: F401,F403
from ._base_offload_config import OffloadDeviceEnum


class DeepSpeedZeroOffloadParamConfig(_base_offload_config.DeepSpeedZeroOffloadParamConfig):
    """See the base's for the other keys."""

    buffer_count: int = Field(5, ge=0)
    """How many pieces of page-locked memory parameters may pass through on their way from and to NVMe, at most."""

    buffer_size: int = Field(pp_int(1e8), ge=0)
    """How many elements such a piece has, at most. A parameter may be of any size."""

    checksum: bool = False
    """Keep a checksum of what is written to NVMe, and compare it with what is read."""

    @model_validator(mode="after")
    def check_nvme(self) -> Any:
        """Raises ValueError for what cannot work."""
        _check_nvme("offload_param", self, ("buffer_count", "buffer_size"))
        return self


class DeepSpeedZeroOffloadOptimizerConfig(_base_offload_config.DeepSpeedZeroOffloadOptimizerConfig):
    """See the base's."""

    @model_validator(mode="after")
    def check_nvme(self) -> Any:
        """Raises ValueError for what cannot work."""
        _check_nvme("offload_optimizer", self, ("buffer_count",))
        return self


_Section = Union[
    _base_offload_config.DeepSpeedZeroOffloadParamConfig, _base_offload_config.DeepSpeedZeroOffloadOptimizerConfig
]


def _check_nvme(name: str, section: _Section, positive: tuple[str, ...]) -> None:
    if section.device != OffloadDeviceEnum.nvme:
        return
    path = section.nvme_path
    if path is None:
        raise ValueError(f"{name}.device is nvme, so {name}.nvme_path has to name a folder on a local disk")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name}.nvme_path has to name a folder, but {path} is a file")
    for key in positive:
        if getattr(section, key) < 1:
            raise ValueError(f"{name}.{key} has to be at least 1, got {getattr(section, key)}")
