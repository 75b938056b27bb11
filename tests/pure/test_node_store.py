"""Where partitions lie in a segment, and who may read them: decisions, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.device_store import DeviceStore
from deepspeed.runtime.zero.gather_mode import Circumstances, GatherMode, why_not
from deepspeed.runtime.zero.node_segment import share
from deepspeed.runtime.zero.node_store import Layout, NodeStore, Shape, lay_by_rank, lay_side_by_side
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import reduce_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
RANKS = st.integers(1, 8)


def spans_of(layout: Layout, ranks: int) -> list[tuple[int, int]]:
    """First byte and the one after the last, of each rank's partition of each parameter that has elements."""
    return [
        (start, start + place.shape.n_bytes)
        for place in layout.places.values()
        for start in (place.offset_bytes + rank * place.stride_bytes for rank in range(ranks))
        if place.shape.n_bytes
    ]


def assert_fits(layout: Layout, ranks: int) -> None:
    """Nothing overlaps, everything is inside, and elements are where their dtype may be."""
    spans = sorted(spans_of(layout, ranks))
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    assert not spans or spans[-1][1] <= layout.n_bytes
    for place in layout.places.values():
        assert place.offset_bytes % place.shape.dtype.itemsize == 0
        assert place.stride_bytes % place.shape.dtype.itemsize == 0


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from(DTYPES))), RANKS)
def test_side_by_side_a_parameter_is_one_piece(shapes: list[tuple[int, torch.dtype]], ranks: int) -> None:
    layout = lay_side_by_side({number: Shape(*shape) for number, shape in enumerate(shapes)}, ranks)
    assert_fits(layout, ranks)
    assert list(layout.places) == list(range(len(shapes)))
    for place in layout.places.values():
        assert place.is_side_by_side
        assert place.offset_bytes % 64 == 0


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 100), min_size=1))), RANKS)
def test_by_rank_a_group_is_one_piece(groups: list[tuple[torch.dtype, list[int]]], ranks: int) -> None:
    numbered: list[dict[int, Shape]] = []
    for dtype, numels in groups:
        first = sum(map(len, numbered))
        numbered.append({first + n: Shape(numel, dtype) for n, numel in enumerate(numels)})
    layout = lay_by_rank(numbered, ranks)
    assert_fits(layout, ranks)
    for group in numbered:
        places = [layout.places[number] for number in group]
        assert places[0].offset_bytes % 64 == 0
        for before, after in zip(places, places[1:]):
            assert after.offset_bytes == before.offset_bytes + before.shape.n_bytes
            assert after.stride_bytes == before.stride_bytes


HERE = Circumstances("machine a")


@pytest.mark.parametrize("mode", [GatherMode.AUTO, GatherMode.NODE])
def test_ranks_of_one_machine_read_each_other(mode: GatherMode) -> None:
    assert why_not([HERE, HERE, HERE], mode) == ""


def test_ranks_of_several_machines_do_not() -> None:
    assert why_not([HERE, Circumstances("machine b")], GatherMode.NODE) == "the ranks are on several machines"


def test_one_rank_that_cannot_is_enough() -> None:
    assert why_not([HERE, Circumstances("machine a", "weights are quantized")], GatherMode.AUTO) == (
        "rank 1: weights are quantized"
    )


def test_device_memory_is_read_only_if_that_is_asked_for() -> None:
    ranks = [Circumstances("machine a", on_device=True)] * 2
    assert "never run on a GPU" in why_not(ranks, GatherMode.AUTO)
    assert why_not(ranks, GatherMode.NODE) == ""


class Alone:
    """The other ranks, of which there are none."""

    rank = 0
    ranks = (0,)

    def exchange_objects(self, mine: Any) -> list[Any]:
        return [mine]


@pytest.mark.parametrize("kind", [NodeStore, DeviceStore])
def test_partitions_keep_their_values_and_get_new_memory(kind: type[NodeStore]) -> None:
    """Two ranks' worth of it in one process: what an owner writes, others read."""
    partitions = {number: torch.arange(10.0) + 10 * number for number in range(3)}
    shapes = {number: Shape(10, torch.float32) for number in partitions}
    layout = lay_by_rank([{0: shapes[0], 2: shapes[2]}, {1: shapes[1]}], ranks=2)
    segment = share(layout.n_bytes, 0, 1, Alone().exchange_objects)
    if kind is DeviceStore:
        memories = [torch.zeros(layout.n_bytes // 2, dtype=torch.uint8) for _ in range(2)]
        stores = [DeviceStore(segment, layout, rank, 2, memories=memories) for rank in range(2)]
    else:
        stores = [NodeStore(segment, layout, rank, 2) for rank in range(2)]
    for store, scale in zip(stores, (1, -1)):
        for number, values in partitions.items():
            partition = scale * values
            store.take(number, partition)
            assert partition.data_ptr() == store.partition(number, store.rank).data_ptr()
    for number, values in partitions.items():
        whole = torch.empty(20)
        stores[0].copy(number, whole)
        assert torch.equal(whole, torch.cat([values, -values]))
        assert stores[0].whole(number) is None
    stores[1].own_span([0, 2]).fill_(5)
    assert torch.equal(stores[0].partition(2, rank=1), torch.full((10,), 5.0))
    assert torch.equal(stores[0].partition(1, rank=1), -partitions[1])


def _own_and_read(rank: int, told: Any) -> None:
    """A rank of two with a GPU each."""
    torch.cuda.set_device(rank)
    mine = torch.full((1000,), float(rank + 1), device=f"cuda:{rank}")
    told[rank].put(reduce_tensor(mine))
    rebuild, arguments = told[1 - rank].get()
    other = rebuild(*arguments)
    copied = torch.empty_like(mine)
    copied.copy_(other)
    assert bool((copied == 2 - rank).all())
    told[2].wait()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_memory_of_another_gpu_is_read() -> None:
    """What `DeviceStore.connect` relies on."""
    context = torch.multiprocessing.get_context("spawn")
    told = (context.Queue(), context.Queue(), context.Barrier(2))
    torch.multiprocessing.spawn(_own_and_read, (told,), nprocs=2)
