"""Report: ZeRO-3 inference is stuck when one rank does not call generate.

Each rank has prompts of its own and the call that users write, ``model.generate(...)``. Where a rank has to wait for
another's progress, it waits for a key in the group's store, so that no test depends on how fast anything is.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from tests.harness import distributed
from tests.models import build, token_ids, zero3_config

NEW_TOKENS = 4
HANG_TIMEOUT_S = 8.0
"""Several times what the test needs when nobody waits for anybody."""

LOCKSTEP_TIMEOUT_S = 2.0


class Generation:
    """The same tiny Llama, plain and under ZeRO-3."""

    def __init__(self, offload: str = "none") -> None:
        self.plain = build("llama")
        engine, *_ = deepspeed.initialize(
            model=copy.deepcopy(self.plain),
            config=zero3_config(gather="auto", offload=offload, stage3_lockstep_timeout_s=LOCKSTEP_TIMEOUT_S),
        )
        engine.eval()
        self.model: PreTrainedModel = engine.module

    def check(self, prompt: int, new_tokens: int = NEW_TOKENS, **options: Any) -> None:
        """Generate for the prompt with that number, and compare the tokens with plain transformers'."""
        ids = token_ids(seed=prompt, batch=1)
        tokens = self.model.generate(ids, max_new_tokens=new_tokens, do_sample=False, **options)
        expected = self.plain.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        assert tokens.tolist() == expected.tolist()


@contextlib.contextmanager
def transformers_knows_of_zero3() -> Iterator[None]:
    """While the object lives, ``generate`` keeps ranks that are done in step with the others."""
    config = HfDeepSpeedConfig(zero3_config(gather="auto"))
    yield
    del config


@distributed(world_size=2, timeout_s=HANG_TIMEOUT_S)
@pytest.mark.parametrize(("offload", "options"), [("none", {}), ("cpu", {"synced_gpus": False})])
def test_rank_that_comes_late(rank: int, offload: str, options: dict[str, Any]) -> None:
    generation = Generation(offload)
    store = _get_default_store()
    if rank == 1:
        store.wait(["rank 0 is done"])
    generation.check(prompt=rank, **options)
    if rank == 0:
        store.set("rank 0 is done", "")


@distributed(world_size=2, timeout_s=HANG_TIMEOUT_S)
@pytest.mark.parametrize("barrier", [False, True], ids=["", "barrier"])
def test_three_prompts_against_five(rank: int, barrier: bool) -> None:
    generation = Generation()
    for prompt in range((3, 5)[rank]):
        generation.check(prompt)
    if barrier:
        torch.distributed.barrier()


@distributed(world_size=3, timeout_s=HANG_TIMEOUT_S, mortal_ranks=(1,))
def test_rank_that_exits(rank: int) -> None:
    generation = Generation()
    generation.check(prompt=rank)
    if rank == 1:
        os._exit(0)
    generation.check(prompt=10 + rank)


@distributed(world_size=2, timeout_s=HANG_TIMEOUT_S)
def test_rank_that_raises(rank: int) -> None:
    generation = Generation()
    with contextlib.suppress(ZeroDivisionError):
        if rank == 1:
            raise ZeroDivisionError("in the user's own code, before generate")
        generation.check(prompt=rank)


@distributed(world_size=2, timeout_s=HANG_TIMEOUT_S)
def test_outputs_of_different_lengths(rank: int) -> None:
    Generation().check(prompt=rank, new_tokens=(4, 9)[rank])


@distributed(world_size=2)
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_outputs_of_different_lengths_in_lockstep(rank: int, offload: str) -> None:
    with transformers_knows_of_zero3():
        Generation(offload).check(prompt=rank, new_tokens=(4, 9)[rank])


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_as_many_prompts_of_one_length_on_each_rank(rank: int, offload: str) -> None:
    generation = Generation(offload)
    for prompt in range(3):
        generation.check(prompt=10 * rank + prompt)
