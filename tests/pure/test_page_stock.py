"""Memory that is used again: when nothing is on it any more, and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.page_stock import HUGE_PAGE_BYTES, PAGE_BYTES, PageStock, aligned_bytes

N_BYTES = 3 * PAGE_BYTES


@pytest.mark.parametrize("n_bytes", [1, PAGE_BYTES, PAGE_BYTES + 1, HUGE_PAGE_BYTES + 5])
def test_memory_begins_where_a_disk_can_read_to(n_bytes: int) -> None:
    for memory in (aligned_bytes(n_bytes), PageStock(0).empty(n_bytes)):
        assert memory.shape == (n_bytes,)
        assert memory.data_ptr() % (HUGE_PAGE_BYTES if n_bytes > HUGE_PAGE_BYTES else PAGE_BYTES) == 0
        assert memory.fill_(7).eq(7).all()


def test_no_bytes() -> None:
    assert aligned_bytes(0).numel() == PageStock(0).empty(0).numel() == 0


def test_released_memory_is_used_again() -> None:
    stock = PageStock(idle_limit_bytes=N_BYTES)
    address = stock.empty(N_BYTES).data_ptr()
    assert stock.idle_bytes == N_BYTES
    again = stock.empty(N_BYTES - 1)  # the same number of pages
    assert again.data_ptr() == address
    assert (stock.mapped, stock.reused, stock.idle_bytes) == (1, 1, 0)


@pytest.mark.parametrize(
    "keep",
    [
        lambda memory: memory[10:20],
        lambda memory: memory.view(torch.float32).view(-1, 4).t(),
        lambda memory: memory.numpy(),
        lambda memory: memory.untyped_storage(),
        lambda memory: memoryview(memory.numpy())[:5],
        lambda memory: torch.utils.dlpack.to_dlpack(memory),
        lambda memory: torch.nn.Parameter(memory.view(torch.float32)),
    ],
    ids=["slice", "other dtype and shape", "numpy", "storage", "memoryview", "DLPack", "parameter"],
)
def test_memory_that_somebody_kept_is_not_used_again(keep: Callable[[torch.Tensor], Any]) -> None:
    stock = PageStock(idle_limit_bytes=10 * N_BYTES)
    memory = stock.empty(N_BYTES)
    address = memory.data_ptr()
    kept = keep(memory)
    del memory
    others = [stock.empty(N_BYTES) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    assert stock.idle_bytes == 0
    del kept
    assert stock.empty(N_BYTES).data_ptr() == address


def test_memory_that_a_graph_needs_for_its_backward_is_not_used_again() -> None:
    stock = PageStock(idle_limit_bytes=10 * N_BYTES)
    weight = stock.empty(16).view(torch.float32).fill_(3.0)
    x = torch.ones(4, requires_grad=True)
    loss = (weight * x).sum()
    del weight
    stock.empty(16).zero_()
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


def test_what_has_been_idle_longest_goes_first() -> None:
    stock = PageStock(idle_limit_bytes=2 * N_BYTES)
    memories = [stock.empty(N_BYTES) for _ in range(3)]
    addresses = [memory.data_ptr() for memory in memories]
    while memories:
        del memories[0]
    assert stock.idle_bytes == 2 * N_BYTES
    assert {stock.empty(N_BYTES).data_ptr() for _ in range(2)} <= set(addresses[1:])


def test_more_than_the_limit_is_not_kept() -> None:
    stock = PageStock(idle_limit_bytes=N_BYTES)
    stock.empty(N_BYTES + 1)
    assert stock.idle_bytes == 0


def test_closed_stock_keeps_nothing() -> None:
    stock = PageStock(idle_limit_bytes=10 * N_BYTES)
    in_use, _ = stock.empty(N_BYTES).fill_(5), stock.empty(N_BYTES)
    del _
    stock.close()
    assert stock.idle_bytes == 0
    assert in_use.eq(5).all()
    del in_use
    assert stock.idle_bytes == 0
