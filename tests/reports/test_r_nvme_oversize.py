"""Report: NVMe offload fails when a parameter is larger than the buffer.

Partitions below 1 MiB never go to NVMe, so each matrix here is larger than that on two ranks as well.
"""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from tests.comparisons import Tolerance
from tests.harness import distributed
from tests.models import token_ids, zero3_config

WIDTH = 1088
MATRIX_NUMEL = WIDTH * WIDTH
VOCABULARY = 2048
TIMEOUT_S = 120.0
OUTPUT = Tolerance(rtol=1e-5, atol=1e-5)


class EmbeddingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids))


class Stack(nn.Module):
    """A block that uses many matrices at once when it is declared a leaf."""

    def __init__(self, matrices: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(matrices))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def nvme_config(path: Path, **options: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(path), "pin_memory": False, "max_in_cpu": 0, **options}
    return zero3_config(gather="auto", offload_param=offload)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build().eval()


def partitioned(build: Callable[[], nn.Module], config: dict[str, Any], seed: int = 0) -> nn.Module:
    """The model with the same weights as ``seeded`` gives it, partitioned while it is built."""
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config):
        return build().eval()


def engine_for(model: nn.Module, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def swap_files(path: Path) -> list[Path]:
    files = sorted(path.rglob("*.swp"))
    assert files, f"expected swap files below {path}, so that the test is about NVMe"
    return files


def check_forwards(engine: deepspeed.DeepSpeedEngine, plain: nn.Module, inputs: torch.Tensor) -> None:
    for repetition in range(2):
        with torch.no_grad():
            OUTPUT.check(engine(inputs), plain(inputs), f"the output of forward {repetition}")


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))


def hidden() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


# -- parameters that fit --


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
def test_parameters_within_the_buffer(shared_dir: Path) -> None:
    config = nvme_config(shared_dir, buffer_count=6, buffer_size=2 * MATRIX_NUMEL)
    engine = engine_for(partitioned(Stack, config), config)
    swap_files(shared_dir)
    check_forwards(engine, seeded(Stack), hidden())


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_parameter_exactly_of_the_buffers_size(shared_dir: Path) -> None:
    config = nvme_config(shared_dir, buffer_count=6, buffer_size=MATRIX_NUMEL)
    engine = engine_for(partitioned(Stack, config), config)
    swap_files(shared_dir)
    check_forwards(engine, seeded(Stack), hidden())


# -- a whole fp32 model given to initialize --


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_whole_fp32_model(shared_dir: Path) -> None:
    plain = seeded(Stack)
    engine = engine_for(copy.deepcopy(plain), nvme_config(shared_dir, buffer_count=6, buffer_size=2 * MATRIX_NUMEL))
    swap_files(shared_dir)
    check_forwards(engine, plain, hidden())


# -- a parameter larger than the buffer (C09) --


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("buffer_size", [1_000, MATRIX_NUMEL // 2 - 1])
def test_parameter_over_the_buffer_in_zero_init(shared_dir: Path, buffer_size: int) -> None:
    config = nvme_config(shared_dir, buffer_size=buffer_size)
    check_forwards(engine_for(partitioned(EmbeddingModel, config), config), seeded(EmbeddingModel), ids())


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
def test_parameter_over_the_buffer_in_initialize(shared_dir: Path) -> None:
    plain = seeded(EmbeddingModel)
    check_forwards(engine_for(copy.deepcopy(plain), nvme_config(shared_dir, buffer_size=1_000)), plain, ids())


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
def test_parameter_over_the_buffer_in_from_pretrained(shared_dir: Path, rank: int) -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    ).eval()
    if rank == 0:
        plain.save_pretrained(shared_dir / "model")
    torch.distributed.barrier()
    config = nvme_config(shared_dir, buffer_size=100_000)
    transformers_config = HfDeepSpeedConfig(config)
    engine = engine_for(LlamaForCausalLM.from_pretrained(shared_dir / "model"), config)
    assert transformers_config.is_zero3()
    with torch.no_grad():
        OUTPUT.check(engine(input_ids=token_ids(0)).logits, plain(input_ids=token_ids(0)).logits, "logits")


# -- more parameters than buffers (C10) --


@distributed(world_size=1, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("buffer_count", [1, 2, 5])
def test_leaf_block_with_more_parameters_than_buffers(shared_dir: Path, buffer_count: int) -> None:
    config = nvme_config(shared_dir, buffer_count=buffer_count, buffer_size=2 * MATRIX_NUMEL)
    # A leaf over this limit is opened, and its matrices come one by one.
    config["zero_optimization"]["stage3_max_live_parameters"] = 100 * MATRIX_NUMEL
    model = partitioned(Stack, config)
    deepspeed.utils.set_z3_leaf_modules(model, [Stack])
    check_forwards(engine_for(model, config), seeded(Stack), hidden())


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_gathering_more_parameters_than_buffers(shared_dir: Path) -> None:
    config = nvme_config(shared_dir, buffer_count=5, buffer_size=2 * MATRIX_NUMEL)
    engine = engine_for(partitioned(lambda: Stack(matrices=17), config), config)
    plain = seeded(lambda: Stack(matrices=17))
    gathered = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(gathered.values())):
        for name, parameter in plain.named_parameters():
            OUTPUT.check(gathered[name].data, parameter.data, name)


# -- two models on one path (C11) --


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_two_models_on_one_path(shared_dir: Path) -> None:
    config = nvme_config(shared_dir, buffer_count=6, buffer_size=2 * MATRIX_NUMEL)
    first = engine_for(partitioned(Stack, config, seed=1), config)
    check_forwards(first, seeded(Stack, seed=1), hidden())
    second = engine_for(partitioned(Stack, config, seed=2), config)
    check_forwards(first, seeded(Stack, seed=1), hidden())
    check_forwards(second, seeded(Stack, seed=2), hidden())


# -- faults of the files --


def swapped_engine(path: Path) -> tuple[deepspeed.DeepSpeedEngine, list[Path]]:
    config = nvme_config(path, buffer_count=6, buffer_size=2 * MATRIX_NUMEL)
    return engine_for(partitioned(Stack, config), config), swap_files(path)


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_truncated_file_raises(shared_dir: Path) -> None:
    engine, files = swapped_engine(shared_dir)
    for file in files:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    with pytest.raises(OSError, match=r"\.swp.*offset"), torch.no_grad():
        engine(hidden())


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_damaged_file_raises(shared_dir: Path) -> None:
    engine, files = swapped_engine(shared_dir)
    for file in files:
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"damage")
    with pytest.raises(OSError, match=r"\.swp"), torch.no_grad():
        engine(hidden())


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_failed_write_raises(shared_dir: Path) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard_limit))
    try:
        with pytest.raises(OSError, match=r"\.swp.*could not write .*File too large"):
            swapped_engine(shared_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
