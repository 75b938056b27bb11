"""Fingerprints of a forward's inputs: equal for equal inputs, different for whatever would make ranks differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.inference.rank_inputs import fingerprint
from hypothesis import given
from hypothesis import strategies as st

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
INPUTS: dict[str, Any] = {"input_ids": IDS, "attention_mask": torch.ones(2, 3, dtype=torch.long), "use_cache": True}

OTHERS: dict[str, dict[str, Any]] = {
    "one value": {"input_ids": IDS + (IDS == 5)},
    "two values exchanged": {"input_ids": IDS.flip(0)},
    "a shape": {"input_ids": IDS.reshape(3, 2)},
    "a type": {"input_ids": IDS.int()},
    "a flag": {"use_cache": False},
    "a tensor less": {"attention_mask": None},
    "a mask": {"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])},
    "tensors exchanged": {"input_ids": INPUTS["attention_mask"], "attention_mask": IDS},
}


def test_equal_inputs_have_equal_fingerprints() -> None:
    again = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in INPUTS.items()}
    assert fingerprint((), INPUTS) == fingerprint((), dict(reversed(again.items())))
    # A view with other strides holds the same.
    assert fingerprint((IDS,), {}) == fingerprint((IDS.t().contiguous().t(),), {})


@pytest.mark.parametrize("what", OTHERS)
def test_other_inputs_have_other_fingerprints(what: str) -> None:
    assert fingerprint((), {**INPUTS, **OTHERS[what]}) != fingerprint((), INPUTS)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.uint8]
)
def test_every_type_counts(dtype: torch.dtype) -> None:
    """Embeddings are inputs, too."""
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert fingerprint((values,), {}) == fingerprint((values.clone(),), {})
    assert fingerprint((values,), {}) != fingerprint((values.roll(1),), {})


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50), st.data())
def test_any_other_token_is_seen(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 200_000).filter(lambda token: token != tokens[at]))
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    words = fingerprint((torch.tensor(tokens),), {}), fingerprint((torch.tensor(changed),), {})
    assert words[0] != words[1]
    assert all(-(1 << 63) <= word < 1 << 63 for pair in words for word in pair)
