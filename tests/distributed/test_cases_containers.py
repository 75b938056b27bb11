"""The hooks find the tensors in any container, going in and coming out, and leave the container itself alone (C15)."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.comparisons import EXACT, assert_released
from tests.containers import (
    Container,
    FrozenOutput,
    NamedOutput,
    Output,
    PlainObject,
    SlottedObject,
    SlottedOutput,
    by_attribute,
)
from tests.distributed.twins import LR, Twins
from tests.harness import distributed
from tests.models import zero3_config
from tests.moe import HIDDEN, hidden_states, seeded

STEPS = 3


@dataclass(frozen=True, slots=True)
class FrozenSlottedOutput:
    hidden: torch.Tensor


@dataclass
class LateOutput:
    """A field that the constructor does not take."""

    hidden: torch.Tensor = dataclasses.field(init=False)


class SlottedHeir(SlottedObject):
    """The tensor lives in a slot of the base class, and there is a ``__dict__`` as well."""


class ListHeir(list[torch.Tensor]):
    """A list with an attribute."""

    note = "kept"


class TypedOutput(NamedTuple):
    hidden: torch.Tensor
    count: int


class SelfReferring:
    """Reaches itself again through an attribute."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.me = self


def late_output(x: torch.Tensor) -> LateOutput:
    output = LateOutput()
    output.hidden = x
    return output


def cache_of(x: torch.Tensor) -> DynamicCache:
    """The tensor as keys, ``(batch, heads, tokens, dim)``, of the one layer of a cache."""
    cache = DynamicCache()
    cache.update(x[None, None], torch.zeros_like(x[None, None]), layer_idx=0)
    return cache


CONTAINERS = {
    "tuple": Container(lambda x: (x, None, 3), lambda value: value[0]),
    "list": Container(lambda x: ["text", x], lambda value: value[1]),
    "heir of list": Container(lambda x: ListHeir([x]), lambda value: value[0]),
    "deque": Container(lambda x: deque([x], maxlen=4), lambda value: value[0]),
    "dict": Container(lambda x: {"hidden": x, 1: None}, lambda value: value["hidden"]),
    "OrderedDict": Container(lambda x: OrderedDict(hidden=x), lambda value: value["hidden"]),
    "defaultdict": Container(lambda x: defaultdict(list, hidden=x), lambda value: value["hidden"]),
    "UserDict": Container(lambda x: UserDict(hidden=x), lambda value: value["hidden"]),
    "set": Container(lambda x: {x}, lambda value: next(iter(value))),
    "frozenset": Container(lambda x: frozenset([x]), lambda value: next(iter(value))),
    "namedtuple": by_attribute(NamedOutput),
    "NamedTuple": by_attribute(lambda x: TypedOutput(x, 2)),
    "dataclass": by_attribute(Output),
    "frozen dataclass": by_attribute(FrozenOutput),
    "slotted dataclass": by_attribute(SlottedOutput),
    "frozen slotted dataclass": by_attribute(FrozenSlottedOutput),
    "dataclass with a late field": by_attribute(late_output),
    "object": by_attribute(PlainObject),
    "slotted object": by_attribute(SlottedObject),
    "heir of a slotted object": by_attribute(SlottedHeir),
    "object that refers to itself": by_attribute(SelfReferring),
    "ModelOutput": Container(
        lambda x: BaseModelOutputWithPast(last_hidden_state=x), lambda value: value.last_hidden_state
    ),
    "DynamicCache": Container(cache_of, lambda value: value.layers[0].keys[0, 0]),
    "ModelOutput with a cache": Container(
        lambda x: BaseModelOutputWithPast(last_hidden_state=x * 1.0, past_key_values=cache_of(x)),
        lambda value: (value.last_hidden_state + value.past_key_values.layers[0].keys[0, 0]) / 2,
    ),
    "list in dict in tuple": Container(lambda x: ({"hidden": [x]},), lambda value: value[0]["hidden"][0]),
    "dataclass in UserDict in list": Container(
        lambda x: [UserDict(out=FrozenOutput(x))], lambda value: value[0]["out"].hidden
    ),
    "set in slotted object in namedtuple": Container(
        lambda x: NamedOutput(SlottedObject({x})),  # type: ignore[arg-type]
        lambda value: next(iter(value.hidden.hidden)),
    ),
    "one tensor in two places": Container(
        lambda x: {"left": [x], "right": PlainObject(x)}, lambda value: (value["left"][0] + value["right"].hidden) / 2
    ),
}


class PackingBlock(nn.Module):
    """Uses its own parameter and packs the result: only a hook that finds the packed tensor brings it back for
    backward."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)
        self._container = container
        self.given: Any = None
        self.returned: Any = None

    def forward(self, value: Any) -> Any:
        self.given = value
        container = CONTAINERS[self._container]
        self.returned = container.pack(torch.relu(container.unpack(value) @ self.weight))
        return self.returned


class PackingModel(nn.Module):
    """Blocks that hand containers to one another, to the middle one by keyword.

    Notes where a block did not get, or its caller not get back, the very object that was handed over.
    """

    def __init__(self, container: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PackingBlock(container) for _ in range(3))
        self._container = container
        self.exchanged: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        container = CONTAINERS[self._container]
        value = container.pack(x)
        for number, block in enumerate(self.blocks):
            result = block(value=value) if number == 1 else block(value)
            if block.given is not value:
                self.exchanged.append(f"block {number} got another {type(block.given).__name__}")
            if result is not block.returned:
                self.exchanged.append(f"the caller of block {number} got another {type(result).__name__}")
            value = result
        return container.unpack(value)


def mean_square(step: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return output.square().mean()


def twins_of(container: str, lr: float | None = LR) -> Twins:
    return Twins(seeded(partial(PackingModel, container)), zero3_config(lr=lr))


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("container", CONTAINERS)
def test_training_through_containers(container: str) -> None:
    twins = twins_of(container)
    for step in range(STEPS):
        twins.train(partial(mean_square, step), f"the loss of step {step}")
        assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_are_handed_over_as_they_are(container: str, rank: int) -> None:
    """With and without grad: the callee gets the caller's object, and the caller the callee's."""
    twins = twins_of(container, lr=None)
    x = hidden_states(seed=rank)
    for with_grad in (False, True):
        with torch.set_grad_enabled(with_grad):
            EXACT.check(twins.engine(x).detach(), twins.plain(x).detach(), "the output")
        assert twins.engine.module.exchanged == []


class Unwilling:
    """An object that cannot be copied or changed, and that has no tensors: a lock, a file, a handle of some library."""

    __slots__ = ()

    def __copy__(self) -> Unwilling:
        raise TypeError("cannot be copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> Unwilling:
        return self

    def __eq__(self, other: object) -> bool:
        raise TypeError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]


class PassesUnwilling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, extra: Any, *, options: Any = None) -> tuple[torch.Tensor, Any, Any]:
        return self.inner(x), extra, options


class GivesUnwilling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PassesUnwilling() for _ in range(2))
        self.extra = Unwilling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, extra, options = block(x, self.extra, options={"extra": [self.extra], "many": list(range(1000))})
            assert extra is self.extra
            assert options["extra"][0] is self.extra
        return x


@distributed(world_size=(1, 2))
def test_objects_without_tensors_are_left_alone() -> None:
    twins = Twins(seeded(GivesUnwilling))
    for step in range(STEPS):
        twins.train(partial(mean_square, step), f"the loss of step {step}")
    twins.compare_weights()
