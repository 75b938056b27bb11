"""``from_pretrained`` under an ``HfDeepSpeedConfig`` (C26): memory, what is read, and what a checkpoint lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers.modeling_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations import HfDeepSpeedConfig

from tests.comparisons import EXACT, Tolerance, assert_same_weights
from tests.harness import distributed
from tests.integration.started_ranks import start
from tests.models import build, zero3_config

SCRIPT = Path(__file__).with_name("from_pretrained_memory.py")
TIMEOUT_S = 60.0
WIDE: dict[str, Any] = {
    "vocab_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LOGITS = Tolerance(rtol=1e-4, atol=1e-4)


class CountingReader:
    """safetensors' reader, which counts the tensors that are read."""

    counts: Counter[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._reader = safe_open(*arguments, **options)

    def __enter__(self) -> CountingReader:
        self._reader.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._reader.__exit__(*exc)

    def get_tensor(self, name: str) -> torch.Tensor:
        self.counts[name] += 1
        tensor: torch.Tensor = self._reader.get_tensor(name)
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    CountingReader.counts = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.modeling_utils, "safe_open", CountingReader)
        yield CountingReader.counts


def saved(name: str, folder: Path, rank: int) -> PreTrainedModel:
    """A model, and its checkpoint in several files."""
    plain = build(name)
    if rank == 0:
        plain.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    torch.distributed.barrier()
    return plain


@distributed(world_size=(1, 2, 3), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("gather", ["collective", "auto"])
def test_every_tensor_is_read_once_by_all_ranks_together(name: str, gather: str, rank: int, shared_dir: Path) -> None:
    plain = saved(name, shared_dir, rank)
    config = zero3_config(gather=gather)
    alive = HfDeepSpeedConfig(config)
    with counted() as counts:
        model = AutoModelForCausalLM.from_pretrained(shared_dir, dtype=torch.float32)
    everyones: list[Counter[str]] = [Counter()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, counts)
    stored = [key for file in shared_dir.glob("*.safetensors") for key in load_file(file)]
    assert sum(everyones, Counter()) == Counter(stored)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert_same_weights(engine.module, plain, EXACT)
    del alive


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("what", ["missing", "misnamed"])
def test_weight_that_the_checkpoint_lacks_is_told_and_initialised(what: str, rank: int, shared_dir: Path) -> None:
    lacking = "model.layers.1.mlp.up_proj.weight"
    plain = build("llama")
    if rank == 0:
        plain.save_pretrained(shared_dir)
        state = load_file(shared_dir / "model.safetensors")
        value = state.pop(lacking)
        if what == "misnamed":
            state["model.layers.1.mlp.upward.weight"] = value
        save_file(state, shared_dir / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()
    config = zero3_config()
    alive = HfDeepSpeedConfig(config)
    model, told = AutoModelForCausalLM.from_pretrained(shared_dir, dtype=torch.float32, output_loading_info=True)
    assert told["missing_keys"] == {lacking}
    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        for name, expected in plain.named_parameters():
            if name != lacking:
                EXACT.check(parameters[name].data, expected.data, name)
        made = parameters[lacking].data.clone()
    # As transformers initialises it, and not whatever was in that memory; the same on all ranks.
    assert made.std().item() == pytest.approx(model.config.initializer_range, rel=0.2)
    assert abs(made.mean().item()) < 0.1 * model.config.initializer_range
    everyones = [torch.empty_like(made) for _ in range(2)]
    torch.distributed.all_gather(everyones, made)
    EXACT.check(everyones[0], everyones[1], "what rank 0 has")
    del alive


@pytest.mark.slow
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_memory_of_a_rank_is_that_of_its_share(name: str, device: str, tmp_path: Path) -> None:
    """C26: from_pretrained and initialize, of a model of 360 or 430 MB, on 2 ranks.

    On the rank that reads, transformers merges the experts of a layer, which takes twice their largest tensor.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain: PreTrainedModel = (
            LlamaForCausalLM(LlamaConfig(**WIDE, hidden_size=1024, intermediate_size=2816, num_hidden_layers=7))
            if name == "llama"
            else MixtralForCausalLM(
                MixtralConfig(**WIDE, hidden_size=768, intermediate_size=512, num_hidden_layers=9, num_local_experts=8)
            )
        )
    plain.eval().save_pretrained(tmp_path / "model", max_shard_size="100MB")
    (tmp_path / "results").mkdir()
    ranks = start("deepspeed", SCRIPT, tmp_path / "model", tmp_path / "results", device)
    with torch.no_grad():
        logits = plain(torch.arange(8)[None], use_cache=False).logits[0, -1]
    for number, rank in enumerate(ranks):
        print(
            name, device, number, rank["peak_bytes"] / rank["model_bytes"], rank["largest_bytes"] / rank["model_bytes"]
        )
        LOGITS.check(torch.tensor(rank["logits"]), logits, f"the logits of rank {number}")
        assert rank["peak_bytes"] <= 1.3 * rank["model_bytes"] / 2 + rank["largest_bytes"]
