"""Whatever is taken, kept and dropped in whatever order: nobody sees another's data, and no more lies idle than may."""

from __future__ import annotations

import torch
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES, PageStock
from hypothesis import given
from hypothesis import strategies as st

SIZES_BYTES = (1, PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 1)


@given(
    limit_pages=st.integers(0, 8),
    steps=st.lists(st.tuples(st.sampled_from(SIZES_BYTES), st.integers(0, 5)), max_size=40),
)
def test_stock(limit_pages: int, steps: list[tuple[int, int]]) -> None:
    """Each step takes a vector, and drops one that is ``age`` steps old; of a half of them a view is what is kept."""
    stock = PageStock(idle_limit_bytes=limit_pages * PAGE_BYTES)
    kept: list[tuple[torch.Tensor, int]] = []
    for number, (n_bytes, age) in enumerate(steps):
        memory = stock.empty(n_bytes).fill_(number)
        kept.append((memory[n_bytes // 2 :] if number % 2 else memory, number))
        del memory
        assert all(tensor.eq(value).all() for tensor, value in kept)
        if age < len(kept):
            del kept[-1 - age]
        assert stock.idle_bytes <= stock.idle_limit_bytes
    assert stock.mapped + stock.reused == len(steps)
