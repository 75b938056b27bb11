"""A chunk whose data a device still copies is not filled again, in whatever order jobs and copies come to their end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from deepspeed.runtime.swap_tensor.chunk_pool import ChunkPool
from deepspeed.runtime.swap_tensor.page_stock import PAGE_BYTES
from hypothesis import given
from hypothesis import strategies as st


@dataclass(eq=False)
class Copy:
    """An event of a device that is done when it has been asked ``delay`` times: then it takes what is in the chunk."""

    chunk: torch.Tensor
    delay: int
    copied: int = -1

    def query(self) -> bool:
        self.delay -= 1
        if self.delay < 0 and self.copied < 0:
            self.copied = int(self.chunk[0])
        return self.copied >= 0

    def synchronize(self) -> None:
        self.delay = 0
        self.query()


@dataclass(eq=False)
class Transfer:
    """Fills a chunk with its number; copied later if it has a delay, at once without."""

    number: int
    delay: int | None
    copies: list[Copy] = field(default_factory=list)
    copied: int = -1

    def start(self, chunk: torch.Tensor) -> None:
        self.chunk = chunk
        chunk.fill_(self.number)

    def finish(self) -> Copy | None:
        if self.delay is None:
            self.copied = int(self.chunk[0])
            return None
        self.copies.append(Copy(self.chunk, self.delay))
        return self.copies[0]

    @property
    def result(self) -> int:
        for copy in self.copies:
            copy.synchronize()
            return copy.copied
        return self.copied


@given(
    count=st.integers(1, 4),
    delays=st.lists(st.none() | st.integers(0, 5), max_size=12),
    data=st.data(),
)
def test_chunks_in_use_are_left_alone(count: int, delays: list[int | None], data: st.DataObject) -> None:
    pool = ChunkPool(PAGE_BYTES, count)
    transfers = [Transfer(number, delay) for number, delay in enumerate(delays)]
    begun: list[Transfer] = []
    for transfer in transfers:
        if not (data.draw(st.booleans()) and pool.try_start(transfer)):
            pool.start(transfer)
        begun.append(transfer)
        if data.draw(st.booleans()):
            pool.finish(begun.pop(data.draw(st.integers(0, len(begun) - 1))))
    for transfer in begun:
        pool.finish(transfer)
    assert [transfer.result for transfer in transfers] == list(range(len(delays)))
