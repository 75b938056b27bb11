"""Which tensors are found in what a module takes and returns, and what is left alone on the way."""

from __future__ import annotations

import enum
import itertools
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.tensor_tree import tensors_in
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast


def found_in(value: Any) -> list[torch.Tensor]:
    return list(tensors_in(value))


def are_found(value: Any, *expected: torch.Tensor) -> bool:
    """Whether exactly ``expected`` is in ``value``: these objects, in this order."""
    return [id(tensor) for tensor in found_in(value)] == [id(tensor) for tensor in expected]


def two() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2), torch.zeros(2)


Pair = namedtuple("Pair", ["first", "second"])


class ListOfOurs(list):
    pass


class DictOfOurs(dict):
    """Like BatchEncoding, but a real dict; what it shows is not what it holds."""

    def values(self) -> Any:
        raise AssertionError("the user's values() ran")


@dataclass
class Record:
    first: Any
    second: Any


@dataclass(frozen=True)
class FrozenRecord:
    first: Any
    second: Any


class SlottedRecord:
    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class SlottedHeir(SlottedRecord):
    """Fills what it inherits and what it adds; its own slots come first."""

    __slots__ = "own"

    def __init__(self, own: Any, inherited: Any) -> None:
        super().__init__(None, inherited)
        self.own = own


class SlottedWithDict(SlottedRecord):
    """No slots of its own, so it has a ``__dict__`` besides; that comes first."""

    def __init__(self, attribute: Any, slot: Any) -> None:
        self.first = slot
        self.attribute = attribute


class _Private:
    __slots__ = ("__hidden", "__weakref__")

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden


class Plain:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "list subclass": lambda a, b: ListOfOurs([a, b]),
    "deque": lambda a, b: deque([a, b]),
    "dict": lambda a, b: {"a": a, 1: b},
    "dict subclass": lambda a, b: DictOfOurs(a=a, b=b),
    "OrderedDict": lambda a, b: OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=b),
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "UserList": lambda a, b: UserList([a, b]),
    "ChainMap": lambda a, b: ChainMap({"a": a}, {"b": b}),
    "namedtuple": Pair,
    "dataclass": Record,
    "frozen dataclass": FrozenRecord,
    "slots": SlottedRecord,
    "inherited slots": SlottedHeir,
    "slots and __dict__": SlottedWithDict,
    "plain object": Plain,
    "ModelOutput": lambda a, b: CausalLMOutputWithPast(loss=a, logits=b),
    "nested": lambda a, b: {"deep": [(Plain({"a": a}, None),), Record(FrozenRecord(None, [[b]]), 1)]},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_both_tensors_of_a_container_are_found_in_order(kind: str) -> None:
    first, second = two()
    assert are_found(CONTAINERS[kind](first, second), first, second)


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("outer", CONTAINERS)
def test_a_container_in_another_one_is_entered(outer: str, kind: str) -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    found = found_in(CONTAINERS[outer](CONTAINERS[kind](tensors[0], tensors[1]), tensors[2]))
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in tensors}
    assert len(found) == 3


@pytest.mark.parametrize("make", [set, frozenset])
def test_tensors_of_a_set_are_found(make: Callable[[Any], Any]) -> None:
    first, second = two()
    assert {id(tensor) for tensor in found_in(make([first, second]))} == {id(first), id(second)}
    assert len(found_in({(first, second), frozenset([second])})) == 2


def test_every_layer_of_a_cache_is_found() -> None:
    cache = DynamicCache()
    states = [torch.randn(1, 2, 3, 4) for _ in range(4)]
    cache.update(states[0], states[1], layer_idx=0)
    cache.update(states[2], states[3], layer_idx=1)
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert are_found(CausalLMOutputWithPast(past_key_values=cache), *held)


def test_a_tensor_is_found_itself_as_are_its_subclasses() -> None:
    tensor, parameter = torch.zeros(2), nn.Parameter(torch.zeros(2))
    assert are_found(tensor, tensor)
    assert are_found((parameter, tensor), parameter, tensor)


@pytest.mark.parametrize(
    "value", [None, 1, 1.5, "text", b"bytes", torch.float32, torch.Size([1]), int, len, ..., [], {}]
)
def test_nothing_is_found_where_nothing_is(value: Any) -> None:
    assert are_found([value, value])
    assert are_found(value)


def test_a_tensor_that_occurs_twice_is_found_once() -> None:
    first, second = two()
    shared = [second, first]
    assert are_found((first, [first], shared, {"again": shared}), first, second)


def test_equal_tensors_are_different_tensors() -> None:
    first, second = two()
    assert are_found([first, second], first, second)
    assert are_found([first, first.view(2)]) is False


def test_cycles_end() -> None:
    first, second = two()
    ring: list[Any] = [first]
    owner = Plain(ring, {"ring": ring})
    ring.extend([owner, ring, second])
    assert are_found(owner, first, second)


def test_depth_is_no_limit() -> None:
    tensor = torch.zeros(2)
    value: Any = tensor
    for _ in range(100_000):
        value = [value]
    assert are_found(value, tensor)
    while isinstance(value, list):  # Python would free it by recursion.
        value = value[0]


def test_a_slot_with_a_private_name_is_seen() -> None:
    tensor = torch.zeros(2)
    assert are_found(_Private(tensor), tensor)


def test_a_slot_with_a_private_name_is_seen_in_an_heir_too() -> None:
    class Heir(_Private):
        __slots__ = ("__hidden",)

        def __init__(self, inherited: Any, own: Any) -> None:
            super().__init__(inherited)
            self.__hidden = own

    inherited, own = two()
    assert {id(tensor) for tensor in found_in(Heir(inherited, own))} == {id(inherited), id(own)}


def test_a_slot_that_was_never_filled_is_skipped() -> None:
    tensor = torch.zeros(2)
    record = SlottedRecord.__new__(SlottedRecord)
    record.second = tensor
    assert are_found(record, tensor)


def test_the_values_of_a_dict_are_found_but_not_its_keys() -> None:
    key, value = two()
    assert are_found({key: value}, value)


def test_properties_are_not_read() -> None:
    class Careful:
        __slots__ = ("tensor", "reads")

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.reads = 0

        @property
        def costly(self) -> torch.Tensor:
            self.reads += 1
            return torch.zeros(2)

    careful = Careful(torch.zeros(2))
    assert are_found(careful, careful.tensor)
    assert careful.reads == 0


def test_a_property_over_an_inherited_slot_is_not_read() -> None:
    class Lazy(SlottedRecord):
        __slots__ = ()

        @property
        def second(self) -> torch.Tensor:
            raise ValueError("the user's property ran")

    tensor = torch.zeros(2)
    lazy = Lazy.__new__(Lazy)
    lazy.first = tensor
    assert are_found(lazy, tensor)


def test_a_lazy_attribute_lookup_is_not_run() -> None:
    class Proxy:
        """Without a ``__dict__``, so that asking for it would end in ``__getattr__``."""

        __slots__ = ("tensor",)

        def __getattr__(self, name: str) -> Any:
            raise ValueError(f"the user's __getattr__ ran for {name}")

    proxy = Proxy()
    proxy.tensor = torch.zeros(2)
    assert are_found(proxy, proxy.tensor)


def test_the_iteration_of_a_list_subclass_is_not_run() -> None:
    class Logged(list):
        def __iter__(self) -> Any:
            raise ValueError("the user's __iter__ ran")

    tensor = torch.zeros(2)
    assert are_found(Logged([tensor]), tensor)


def test_iterators_are_not_consumed() -> None:
    tensor = torch.zeros(2)
    generator = (t for t in [tensor])
    iterators = [generator, iter([tensor]), map(torch.neg, [tensor]), itertools.repeat(tensor, 1)]
    assert are_found(iterators)
    assert next(generator) is tensor
    assert all(len(list(iterator)) == 1 for iterator in iterators[1:])


def test_modules_are_not_entered() -> None:
    tensor = torch.zeros(2)
    assert are_found([nn.Linear(2, 2), Plain(nn.ParameterList([nn.Parameter(tensor)]), tensor)], tensor)


def test_enum_members_and_bound_methods_are_not_entered() -> None:
    class Choice(enum.Enum):
        TENSOR = torch.zeros(2)

    assert are_found([Choice.TENSOR, Plain(torch.zeros(2), None).__init__])


def test_nothing_is_changed() -> None:
    first, second = two()
    default: defaultdict[str, Any] = defaultdict(list, a=first)
    value = [default, FrozenRecord(second, (first,)), Record(field(), None)]
    before = list(value), dict(default), list(vars(value[1]))
    assert are_found(value, first, second)
    assert (list(value), dict(default), list(vars(value[1]))) == before


def test_finding_is_lazy() -> None:
    """Whoever needs one tensor does not pay for all."""
    first, second = two()
    finder = tensors_in([first, second])
    assert next(finder) is first
    assert next(finder) is second
    assert next(finder, None) is None
