"""Models that are loaded slice by slice hold, on each rank, exactly what they would if divided in memory."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.tensor_parallel import checkpoint, safetensors_file
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.harness import distributed
from tests.tensor_parallel_models import FAMILIES, HIDDEN, VOCABULARY, build

SHARD = "3MB"
"""So that a model is several files, and experts of one parameter are in different ones."""
SAVED = tuple(family for family in FAMILIES if family != "hand-written")


def save(model: PreTrainedModel, folder: Path) -> None:
    """On rank 0; the others wait."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder, max_shard_size=SHARD)
    dist.barrier()


def load(model: Any, ranks: int, dtype: torch.dtype = torch.float32, **options: Any) -> InferenceEngine:
    return deepspeed.init_inference(model, tensor_parallel={"tp_size": ranks}, dtype=dtype, **options)


def assert_equal(loaded: nn.Module, divided: nn.Module) -> None:
    """Parameters and buffers, bit by bit, ties included."""
    expected = {**dict(divided.named_parameters()), **dict(divided.named_buffers())}
    actual = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def generated(model: Any) -> torch.Tensor:
    tokens = torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    return model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)


@distributed(world_size=(2, 3))
@pytest.mark.parametrize("families", [SAVED[:3], SAVED[3:6], SAVED[6:]], ids=lambda families: "+".join(families))
def test_a_folder_is_loaded_in_slices(families: tuple[str, ...], world_size: int, shared_dir: Path) -> None:
    for family in families:
        folder = shared_dir / family
        folder.mkdir(exist_ok=True)
        check_loading(family, folder, world_size)


def check_loading(family: str, shared_dir: Path, world_size: int) -> None:
    """Experts are stored one by one, and are one parameter in the model. No byte is read that is not kept."""
    whole = build(family, tie_word_embeddings=family in ("llama", "mixtral", "opt"))
    save(whole, shared_dir)
    with pytest.MonkeyPatch.context() as monkeypatch:
        # The rows of these models are shorter than what is worth a call.
        monkeypatch.setattr(safetensors_file, "_LEAST_RUN_BYTES", 0)
        engine = load(str(shared_dir), world_size)
    assert_equal(engine.module, load(copy.deepcopy(whole), world_size).module)
    assert engine.loaded is not None
    held = [*engine.module.parameters(), *(buffer for name, buffer in engine.module.named_buffers() if "bias" in name)]
    assert engine.loaded.bytes_read <= sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert torch.equal(generated(engine), generated(whole))


@distributed(world_size=2)
def test_stored_names_and_types_are_transformers_own(world_size: int, shared_dir: Path) -> None:
    """What from_pretrained makes of the folder, in another type than it is stored in."""
    save(build("mixtral"), shared_dir)
    names = json.loads((shared_dir / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.3.w2.weight" in name for name in names)
    whole = AutoModelForCausalLM.from_pretrained(shared_dir, dtype=torch.bfloat16)
    engine = load(str(shared_dir), world_size, dtype=torch.bfloat16)
    assert_equal(engine.module, load(whole, world_size, dtype=torch.bfloat16).module)


@distributed(world_size=2)
@pytest.mark.parametrize("said_as", ["folder", "description", "file"])
def test_a_model_on_the_meta_device(said_as: str, world_size: int, shared_dir: Path) -> None:
    whole = build("qwen3-moe")
    save(whole, shared_dir)
    if said_as == "file" and dist.get_rank() == 0:
        stored = {key: value for file in shared_dir.glob("*.safetensors") for key, value in load_file(file).items()}
        save_file(stored, shared_dir / "all.safetensors")
    dist.barrier()
    files = [path.name for path in sorted(shared_dir.glob("model-*.safetensors"))]
    given: Any = {
        "folder": str(shared_dir),
        "description": {"type": "ds_model", "version": 1.0, "checkpoints": files, "base_dir": str(shared_dir)},
        "file": str(shared_dir / "all.safetensors"),
    }[said_as]
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shared_dir))
    engine = load(empty.eval(), world_size, checkpoint=given)
    assert_equal(engine.module, load(whole, world_size).module)


@distributed(world_size=2)
def test_conversions_that_are_not_known_are_left_to_transformers(world_size: int, shared_dir: Path) -> None:
    whole = build("mixtral")
    save(whole, shared_dir)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoint, "_follow", lambda converter, sources: None)
        engine = load(str(shared_dir), world_size)
    assert_equal(engine.module, load(whole, world_size).module)


class Plain(nn.Module):
    """No model of transformers: names in the file are those of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, 512)
        self.fc2 = nn.Linear(512, HIDDEN)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(states)))


@distributed(world_size=2)
def test_a_plain_module_on_the_meta_device(world_size: int, shared_dir: Path) -> None:
    torch.manual_seed(0)
    whole = Plain()
    if dist.get_rank() == 0:
        save_file(whole.state_dict(), shared_dir / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        empty = Plain()
    engine = load(empty, world_size, checkpoint=str(shared_dir))
    states = torch.randn(3, HIDDEN)
    torch.testing.assert_close(engine(states), whole(states), rtol=1e-4, atol=1e-4)


@distributed(world_size=2)
def test_what_is_missing_or_of_another_shape_is_named(world_size: int, shared_dir: Path) -> None:
    whole = Plain()
    state = whole.state_dict()
    if dist.get_rank() == 0:
        (shared_dir / "lacking").mkdir()
        (shared_dir / "other").mkdir()
        save_file(
            {key: value for key, value in state.items() if key != "fc2.bias"}, shared_dir / "lacking/a.safetensors"
        )
        save_file({**state, "fc1.bias": torch.zeros(7)}, shared_dir / "other/a.safetensors")
    dist.barrier()
    for folder, message in (
        ("lacking", "no tensors for fc2.bias"),
        ("other", r"fc1.bias: expected shape \(512,\), got"),
    ):
        with torch.device("meta"):
            empty = Plain()
        with pytest.raises(ValueError, match=message):
            load(empty, world_size, checkpoint=str(shared_dir / folder))
    with torch.device("meta"), pytest.raises(ValueError, match="say where its weights are"):
        load(Plain(), world_size)


@distributed(world_size=2)
def test_quantized_weights_are_refused(world_size: int, shared_dir: Path) -> None:
    save(build("llama"), shared_dir)
    if dist.get_rank() == 0:
        config = json.loads((shared_dir / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4"}
        (shared_dir / "config.json").write_text(json.dumps(config))
    dist.barrier()
    with pytest.raises(ValueError, match="quantized weights cannot be loaded slice by slice"):
        load(str(shared_dir), world_size)


@distributed(world_size=2)
def test_one_rank_loads_the_whole_model(rank: int, shared_dir: Path) -> None:
    whole = build("mixtral")
    save(whole, shared_dir)
    engine = load(str(shared_dir), 1)
    assert_equal(engine.module, whole)
    if rank == 1:
        assert torch.equal(generated(engine), generated(whole))
