"""Where partitions lie in a segment, and who may read them: decisions, without ranks."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero.gather_mode import Circumstances, GatherMode, why_not
from deepspeed.runtime.zero.node_store import Layout, Shape, lay_by_rank, lay_side_by_side
from hypothesis import given
from hypothesis import strategies as st

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
