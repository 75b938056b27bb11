"""Any partitions, through any pool, in any order: what is read is what was written, and chunks are never short."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from deepspeed.runtime.swap_tensor.chunk_pool import ChunkPool, extents_of, fitting_pool
from deepspeed.runtime.swap_tensor.nvme_tier import NvmeTier, Read
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES, aligned_bytes
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swap_engine import PlainEngine

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@given(st.integers(0, 10**7), st.integers(1, 2000).map(lambda pages: pages * PAGE_BYTES))
def test_extents_cover_everything_once(n_bytes: int, chunk_bytes: int) -> None:
    position = 0
    for extent in extents_of(n_bytes, chunk_bytes):
        assert extent.offset_bytes == position
        assert 0 < extent.n_bytes <= chunk_bytes
        position += extent.n_bytes
    assert position == n_bytes


@given(
    chunk_pages=st.integers(1, 5000),
    count=st.integers(1, 8),
    least_pages=st.integers(1, 300),
    limit_bytes=st.integers(0, 10**8),
)
def test_pool_is_made_to_fit(chunk_pages: int, count: int, least_pages: int, limit_bytes: int) -> None:
    least_bytes = min(least_pages, chunk_pages) * PAGE_BYTES
    fitting_bytes, fitting_count = fitting_pool(chunk_pages * PAGE_BYTES, count, least_bytes, limit_bytes)
    assert least_bytes <= fitting_bytes <= chunk_pages * PAGE_BYTES
    assert 1 <= fitting_count <= count
    assert fitting_bytes * fitting_count <= max(limit_bytes, least_bytes)
    if chunk_pages * PAGE_BYTES * count <= limit_bytes:
        assert (fitting_bytes, fitting_count) == (chunk_pages * PAGE_BYTES, count), "nothing is given up for nothing"


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, torch.dtype]:
    return draw(st.integers(0, 12_000)), draw(st.sampled_from(DTYPES))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_reads_give_what_was_written(data: st.DataObject) -> None:
    pool = ChunkPool(PAGE_BYTES * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    engine = PlainEngine()
    with tempfile.TemporaryDirectory() as directory:
        tier = NvmeTier(SwapFolder(Path(directory), "test"), engine, pool, checksums=data.draw(st.booleans()))
        kinds = data.draw(st.lists(partitions(), min_size=1, max_size=5))
        stored = [tier.add(number, f"p{number}", *kind) for number, kind in enumerate(kinds)]
        latest = [torch.empty(0)] * len(stored)
        begun: list[tuple[int, torch.Tensor, torch.Tensor, Read]] = []

        def write(number: int, seed: int) -> None:
            """Sometimes from a place that allows direct I/O, sometimes from one that does not or in another dtype."""
            latest[number] = values(stored[number].numel, stored[number].dtype, seed)
            kind = data.draw(st.sampled_from(["aligned", "shifted", "other dtype"]))
            tier.write(stored[number], placed(latest[number], kind))

        def placed(tensor: torch.Tensor, kind: str) -> torch.Tensor:
            if kind == "other dtype":
                return tensor.to(torch.float64)
            shift = 0 if kind == "aligned" else tensor.element_size()
            room = aligned_bytes(tensor.numel() * tensor.element_size() + shift)[shift:].view(tensor.dtype)
            return room.copy_(tensor)

        for number in range(len(stored)):
            write(number, seed=number)
        for turn in range(data.draw(st.integers(1, 10))):
            number = data.draw(st.integers(0, len(stored) - 1))
            action = data.draw(st.sampled_from(["begin", "end", "write"]))
            if action == "begin":
                kind = data.draw(st.sampled_from(["aligned", "shifted", "other dtype"]))
                room = placed(torch.zeros(stored[number].numel, dtype=stored[number].dtype), kind)
                begun.append((number, room, latest[number], tier.read(stored[number], room)))
            elif action == "end" and begun:
                _, room, expected, read = begun.pop(data.draw(st.integers(0, len(begun) - 1)))
                read.wait()
                assert torch.equal(room.to(expected.dtype), expected)
            elif action == "write" and all(n != number for n, *_ in begun):
                write(number, seed=100 + turn)
        for _, room, expected, read in begun:
            read.wait()
            assert torch.equal(room.to(expected.dtype), expected)
        assert pool.is_idle
        assert not engine.in_flight
        tier.close()
        assert not list(Path(directory).iterdir())
