"""Whatever is read and written, in whatever pieces and order: the bytes are those of plain file I/O."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.io_op import BACKENDS, io_op, memory, require_backend, some_bytes, stored

FILE_BYTES = 300_000
EDGES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 65536, 65537, FILE_BYTES)


@dataclass(frozen=True)
class Transfer:
    begin: int
    n_bytes: int
    is_write: bool
    misaligned_by: int | None
    seed: int


@st.composite
def disjoint_transfers(draw: st.DrawFn) -> list[Transfer]:
    """Neighbours that share pages, blocks and huge pages, but no byte."""
    points = draw(st.sets(st.one_of(st.sampled_from(EDGES), st.integers(0, FILE_BYTES)), min_size=2, max_size=8))
    cuts = sorted(points)
    return [
        Transfer(
            begin=begin,
            n_bytes=end - begin,
            is_write=draw(st.booleans()),
            misaligned_by=draw(st.sampled_from([None, 1, 64, 511, 512, 4096])),
            seed=seed,
        )
        for seed, (begin, end) in enumerate(zip(cuts, cuts[1:]))
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    transfers=disjoint_transfers(),
    order=st.randoms(use_true_random=False),
    block_bytes=st.sampled_from([1, 4096, 12288, 65536, 2**20]),
    queue_depth=st.sampled_from([1, 2, 7, 32]),
    n_threads=st.integers(1, 3),
    rounds=st.integers(1, 2),
)
def test_transfers_under_way_together_are_each_as_if_alone(
    backend, transfers, order, block_bytes, queue_depth, n_threads, rounds
) -> None:
    require_backend(backend)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        expected = some_bytes(FILE_BYTES, seed=99)
        path.write_bytes(expected.numpy().tobytes())
        with io_op().engine(block_bytes, queue_depth, n_threads, backend) as engine, engine.open(path, "rw") as file:
            for _ in range(rounds):
                order.shuffle(transfers)
                begun = []
                for transfer in transfers:
                    tensor = memory(transfer.n_bytes, transfer.misaligned_by)
                    if transfer.is_write:
                        tensor.copy_(some_bytes(transfer.n_bytes, transfer.seed))
                    submit = engine.submit_write if transfer.is_write else engine.submit_read
                    begun.append((transfer, tensor, submit(file, tensor, transfer.begin)))
                for transfer, tensor, request in order.sample(begun, len(begun)):
                    assert request.wait() == transfer.n_bytes
                    span = slice(transfer.begin, transfer.begin + transfer.n_bytes)
                    if transfer.is_write:
                        expected[span] = tensor
                    assert torch.equal(tensor, expected[span])
            assert engine.stats().most_blocks_at_once <= max(queue_depth * n_threads, n_threads)
        assert torch.equal(stored(path), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=60)
@given(
    n_bytes=st.one_of(st.sampled_from(EDGES), st.integers(0, 200_000)),
    offset=st.one_of(st.sampled_from(EDGES), st.integers(0, 2**33)),
    misaligned_by=st.sampled_from([None, 3, 64]),
    results=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 511, 512, 4096, 5000, -4, -11])), max_size=12),
)
def test_short_and_interrupted_transfers_are_continued(backend, n_bytes, offset, misaligned_by, results) -> None:
    """-4 is EINTR, -11 EAGAIN; a number is how many bytes a completion says that it moved."""
    require_backend(backend)
    with tempfile.TemporaryDirectory() as folder, io_op().engine(8192, 4, 1, backend) as engine:
        path = Path(folder) / "file"
        source = memory(n_bytes, misaligned_by)
        source.copy_(some_bytes(n_bytes))
        for is_write in (True, False):
            for nth, result in results:
                engine.inject_result(nth, result)
            if is_write:
                assert engine.submit_write(path, source, offset).wait() == n_bytes
                assert torch.equal(stored(path, offset), source)
            else:
                target = memory(n_bytes, misaligned_by)
                assert engine.submit_read(path, target, offset).wait() == n_bytes
                assert torch.equal(target, source)
