"""Tensor-parallel inference as a user starts it: three ways to start ranks, and the memory that they take (C26)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tests.integration.started_ranks import start
from tests.integration.tensor_parallel_run import TOKENS
from tests.tensor_parallel_models import build

SCRIPT = Path(__file__).with_name("tensor_parallel_run.py")
LARGE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 4,
}
"""400 MB of fp32. Experts are stored one by one: the largest slice is that of an expert or of the vocabulary."""
SLACK_BYTES = 16 * 2**20
"""The Python objects of the model, of transformers' conversion and of the process group."""


def test_ranks_that_were_started_by_hand(tmp_path: Path) -> None:
    """Neither LOCAL_SIZE nor LOCAL_RANK is set."""
    whole = build("mixtral")
    whole.save_pretrained(tmp_path / "model")
    expected = whole.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False).tolist()
    assert [rank["tokens"] for rank in start("plain", SCRIPT, tmp_path / "model", tmp_path)] == [expected] * 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder with the model, and what it generates in one process."""
    folder = tmp_path_factory.mktemp("large")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(**LARGE)).eval()
    model.save_pretrained(folder)
    return folder, model.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False).tolist()


@pytest.mark.parametrize(
    ("way", "source"), [("deepspeed", "folder"), pytest.param("torchrun", "in-memory", marks=pytest.mark.slow)]
)
def test_memory_of_a_rank_is_that_of_its_share(
    way: str, source: str, large: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """C26, under both launchers; torchrun does not set LOCAL_SIZE.

    A model that is in memory already is divided without another copy, and what is not kept is free.
    """
    folder, expected = large
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert stored_bytes > 350_000_000
    slice_bytes = 4 * LARGE["hidden_size"] * max(LARGE["intermediate_size"], LARGE["vocab_size"]) // 2
    for rank in start(way, SCRIPT, folder, tmp_path, *([source] if source == "in-memory" else [])):
        print(source, rank)
        assert rank["tokens"] == expected
        assert rank["local_size"] == "2"
        assert rank["held_bytes"] <= 1.01 * stored_bytes / 2
        if source == "folder":
            assert rank["peak_bytes"] <= 1.3 * stored_bytes / 2 + slice_bytes
            assert rank["read_bytes"] <= 1.01 * rank["held_bytes"]
        else:
            largest = 2 * LARGE["num_local_experts"] * LARGE["intermediate_size"] * LARGE["hidden_size"]
            assert rank["peak_bytes"] <= 4 * largest + SLACK_BYTES
            assert rank["after_bytes"] <= rank["held_bytes"] + SLACK_BYTES
