"""Any nesting of containers holds exactly the tensors that were put in, each found once, in order."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.zero.tensor_tree import tensors_in
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = 300


@dataclass(frozen=True)
class Frozen:
    parts: tuple[Any, ...]


class Slotted:
    __slots__ = ("__parts", "unfilled")

    def __init__(self, parts: list[Any]) -> None:
        self.__parts = parts


class Attributes:
    def __init__(self, parts: list[Any]) -> None:
        vars(self).update({f"part_{index}": part for index, part in enumerate(parts)})


def numbered(parts: list[Any]) -> dict[int, Any]:
    return dict(enumerate(parts))


ORDERED: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "UserList": UserList,
    "dict": numbered,
    "OrderedDict": lambda parts: OrderedDict(numbered(parts)),
    "UserDict": lambda parts: UserDict(numbered(parts)),
    "dataclass": lambda parts: Frozen(tuple(parts)),
    "slots": Slotted,
    "namespace": lambda parts: SimpleNamespace(**{f"part_{index}": part for index, part in enumerate(parts)}),
    "object": Attributes,
}


@dataclass(frozen=True)
class Tensor:
    """A new tensor."""


@dataclass(frozen=True)
class Atom:
    value: Any


@dataclass(frozen=True)
class Again:
    """Something that was built before: the ``back``-th last one."""

    back: int


@dataclass(frozen=True)
class Container:
    kind: str
    parts: tuple[Any, ...]


@dataclass
class Builder:
    """Builds what a description says, and notes tensors in the order in which they are to be found."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    built: list[Any] = field(default_factory=list)

    def build(self, description: Any) -> Any:
        if isinstance(description, Tensor):
            tensor = torch.zeros(())
            self.tensors.append(tensor)
            return self.note(tensor)
        if isinstance(description, Again):
            return self.built[-1 - description.back % len(self.built)] if self.built else None
        if isinstance(description, Atom):
            return description.value
        return self.note(ORDERED[description.kind]([self.build(part) for part in description.parts]))

    def note(self, value: Any) -> Any:
        self.built.append(value)
        return value


ATOMS = st.builds(Atom, st.sampled_from([None, True, 3, 0.5, "text", b"x", torch.float32, torch.Size([2]), int, ()]))
DESCRIPTIONS = st.recursive(
    st.one_of(st.just(Tensor()), st.just(Tensor()), ATOMS, st.builds(Again, st.integers(0, 20))),
    lambda parts: st.builds(Container, st.sampled_from(sorted(ORDERED)), st.lists(parts, max_size=4).map(tuple)),
    max_leaves=25,
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(description=DESCRIPTIONS)
def test_exactly_the_tensors_that_were_put_in_are_found_in_order(description: Any) -> None:
    builder = Builder()
    value = builder.build(description)
    # An earlier object comes again only after it was built, so that the first time decides the order.
    assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for tensor in builder.tensors]


@settings(max_examples=EXAMPLES, deadline=None)
@given(description=DESCRIPTIONS, links=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=6))
def test_cycles_neither_hide_nor_repeat_a_tensor(description: Any, links: list[tuple[int, int]]) -> None:
    builder = Builder()
    value = builder.build(description)
    growing = [built for built in builder.built if isinstance(built, (list, deque, UserList, Attributes))]
    for number, (source, target) in enumerate(links):
        if growing:
            holder, part = growing[source % len(growing)], builder.built[target % len(builder.built)]
            if isinstance(holder, Attributes):
                setattr(holder, f"link_{number}", part)
            else:
                holder.append(part)
    found = list(tensors_in(value))
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in builder.tensors}
    assert len(found) == len(builder.tensors)
