"""Whatever ranks saved a parameter, the parts that others read of it make the parameter."""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.saved_partitions import partition_numel, pieces
from hypothesis import given
from hypothesis import strategies as st

RANKS = st.integers(1, 9)


@given(numel=st.integers(0, 60), saved_ranks=RANKS, ranks=RANKS)
def test_parts_make_the_parameter(numel: int, saved_ranks: int, ranks: int) -> None:
    whole = torch.arange(1, numel + 1)
    padded = torch.zeros(partition_numel(numel, saved_ranks) * saved_ranks, dtype=whole.dtype)
    padded[:numel] = whole
    saved = padded.chunk(saved_ranks) if numel else [padded] * saved_ranks
    parts = []
    for rank in range(ranks):
        part = torch.zeros(partition_numel(numel, ranks), dtype=whole.dtype)
        for piece in pieces(numel, saved_ranks, rank, ranks):
            source = saved[piece.saved_rank][piece.saved_start : piece.saved_start + piece.numel]
            part[piece.start : piece.start + piece.numel] = source
        parts.append(part)
    read = torch.cat(parts)
    assert torch.equal(read[:numel], whole)
    assert not read[numel:].any(), "what fills the last partition up is zero"


@given(numel=st.integers(1, 10_000), ranks=RANKS, rank=st.integers(0, 8))
def test_as_many_ranks_read_what_they_saved(numel: int, ranks: int, rank: int) -> None:
    found = list(pieces(numel, ranks, rank % ranks, ranks))
    assert [piece.saved_rank for piece in found] in ([], [rank % ranks])
