"""The base's writer and reader of checkpoint files, with errors that name the file, and are raised on every rank.

A rank that cannot write its file keeps that to itself until all have written theirs: the others would wait for it in
the next collective.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

from . import _base_torch_checkpoint_engine
from ._base_torch_checkpoint_engine import *  # noqa: F401,F403


class TorchCheckpointEngine(_base_torch_checkpoint_engine.TorchCheckpointEngine):
    """See the base's. Files are written between `create` and `commit`, which all ranks call."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self._is_saving = False
        self._failure: Optional[str] = None

    def create(self, info: CheckpointCommitInfo) -> None:
        super().create(info)
        self._is_saving = True
        self._failure = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file.

        Raises:
            OSError: it could not be written, and this is not part of a checkpoint, which `commit` ends.
        """
        try:
            super().save(state_dict, path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter.
            failure = f"{path}: could not be written ({_in_one_line(error)})"
            if not self._is_saving:
                raise OSError(failure) from error
            self._failure = self._failure or failure

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """All ranks have written their files when this returns. A collective.

        Raises:
            OSError: some rank could not. On all ranks.
        """
        failures = _of_all_ranks(self._failure)
        self._is_saving = False
        self._failure = None
        failed = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            raise OSError(
                f"checkpoint {info.tag} in {info.save_dir} is not complete, and is not the latest one: "
                f"{'; '.join(failed)}. Training can go on; make room, and save again."
            )
        return bool(super().commit(info))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file.

        Raises:
            RuntimeError: it is damaged.
        """
        with naming_damage(path):
            return super().load(path, map_location)


@contextmanager
def naming_damage(path: str | Path) -> Iterator[None]:
    """Have what torch says of a file that it cannot read name the file.

    Raises:
        RuntimeError: it is damaged.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise RuntimeError(f"{path}: damaged, or not written by save_checkpoint ({_in_one_line(error)})") from error


def _of_all_ranks(mine: Optional[str]) -> list[Optional[str]]:
    if not dist.is_initialized():
        return [mine]
    everyones: list[Optional[str]] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
