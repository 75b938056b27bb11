"""Parts of tensors in safetensors files, and of tensors that are put together from several: compared with torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepspeed.module_inject.tensor_parallel.checkpoint import Checkpoint, checkpoint_files
from deepspeed.module_inject.tensor_parallel.lazy_tensor import (
    Computed,
    Joined,
    LazyTensor,
    Narrowed,
    Region,
    Stacked,
    Stored,
    Transposed,
)
from deepspeed.module_inject.tensor_parallel.safetensors_file import SafetensorsFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

WIDE = 400
"""Columns of fp32: half of them are more than a run that is worth a call, so that both ways of reading are taken."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[SafetensorsFile, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "vector": torch.randn(7, generator=generator),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "narrow": torch.randn(5, 6, generator=generator),
        "wide": torch.randn(4, WIDE, generator=generator),
        "experts": torch.randn(3, 4, 5, generator=generator).bfloat16(),
        "deep": torch.randint(-9, 9, (2, 3, 4, 5), generator=generator),
        "flags": torch.rand(4, 4, generator=generator) > 0.5,
    }
    path = tmp_path_factory.mktemp("slices") / "model.safetensors"
    save_file(tensors, path)
    return SafetensorsFile(path), tensors


def regions(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    def span(size: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), max(ends)))

    return st.tuples(*(span(size) for size in shape))


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def read(lazy: LazyTensor, region: Region, dtype: torch.dtype) -> torch.Tensor:
    part = torch.empty([stop - start for start, stop in region], dtype=dtype)
    lazy.read_into(region, part)
    return part


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_region_is_what_slicing_gives(
    stored: tuple[SafetensorsFile, dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    file, tensors = stored
    name = data.draw(st.sampled_from(sorted(tensors)))
    region = data.draw(regions(tuple(tensors[name].shape)))
    assert torch.equal(file.read(file.tensors[name], region), part_of(tensors[name], region))


def test_only_the_bytes_of_a_part_are_read(stored: tuple[SafetensorsFile, dict[str, torch.Tensor]]) -> None:
    file, _ = stored
    before = file.bytes_read
    file.read(file.tensors["wide"], ((1, 3), (0, WIDE)))
    file.read(file.tensors["wide"], ((0, 4), (100, 300)))
    assert file.bytes_read - before == 4 * (2 * WIDE + 4 * 200)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_of_composed_tensors_equal_torch(
    stored: tuple[SafetensorsFile, dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    file, tensors = stored
    base, value = Stored(file.tensors["narrow"]), tensors["narrow"]
    pairs: list[tuple[LazyTensor, torch.Tensor]] = [
        (Stacked((base, base, base), 0), torch.stack([value] * 3)),
        (Stacked((base, base), 2), torch.stack([value] * 2, dim=2)),
        (Joined((base, Narrowed(base, 0, 1, 2)), 0), torch.cat([value, value[1:3]])),
        (Joined((Stacked((base, base), 0), Stacked((base, base), 0)), 1), torch.cat([torch.stack([value] * 2)] * 2, 1)),
        (Transposed(base, (0, 1)), value.T),
        (Stacked((Transposed(base, (0, 1)),), 1), value.T.unsqueeze(1)),
        (Narrowed(Transposed(base, (0, 1)), 0, 2, 3), value.T[2:5]),
        (Computed((5, 6), lambda: value + 1), value + 1),
    ]
    lazy, expected = data.draw(st.sampled_from(pairs))
    assert tuple(lazy.shape) == tuple(expected.shape)
    region = data.draw(regions(tuple(expected.shape)))
    assert torch.equal(read(lazy, region, torch.float32), part_of(expected, region))
    assert torch.equal(read(lazy, region, torch.bfloat16), part_of(expected, region).bfloat16())


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(64, 64)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(OSError, match=r"model.safetensors: weight: expected 16384 bytes .* it is truncated"):
        SafetensorsFile(path)


def test_a_file_that_is_cut_while_it_is_open_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(64, 64)}, path)
    file = SafetensorsFile(path)
    with path.open("r+b") as cut:
        cut.truncate(path.stat().st_size - 100)
    with pytest.raises(OSError, match="weight: expected 16384 bytes .* cut short"):
        file.read(file.tensors["weight"], ((0, 64), (0, 64)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (20).to_bytes(8, "little") + b"not json at all, no ",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_a_damaged_header_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors"):
        SafetensorsFile(path)


def test_a_lying_header_is_a_value_error(tmp_path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 60]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ValueError, match="weight: expected 64 bytes .* got 60"):
        SafetensorsFile(path)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="save_pretrained writes safetensors"):
        checkpoint_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}', "utf-8")
    with pytest.raises(FileNotFoundError, match="one.safetensors"):
        checkpoint_files(tmp_path)


def test_tensors_of_a_plain_module_go_by_their_names(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save_file({**module.state_dict(), "surplus": torch.ones(1)}, tmp_path / "model.safetensors")
    with Checkpoint(checkpoint_files(tmp_path)) as checkpoint:
        found, unexpected = checkpoint.tensors_for(module)
        assert unexpected == ["surplus"]
        assert found.keys() == module.state_dict().keys()
        for name, lazy in found.items():
            assert torch.equal(read(lazy, lazy.whole, module.state_dict()[name].dtype), module.state_dict()[name])
