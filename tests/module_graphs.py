"""Programs: a random module graph, budgets for it, and the steps to run on it. Nothing here knows DeepSpeed.

A ``Program`` is a frozen value. It can be drawn by hypothesis (``programs``), sent to other processes, printed as the
source that makes it (``source``) and turned into a model (``GraphModel``), always with the same weights.

Shapes: every module maps ``x_RD`` to tensors of the same shape. R rows, D ``HIDDEN``, W the width of one module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 8
RANKS = 2
"""Each step says what up to this many ranks do."""
FLAGS = 2
"""Branches choose by one of so many flags of the step."""
GATHER_MODES = ("collective", "auto")
MAX_ROUTES = 3
MAX_CHILDREN = 3
MAX_FAN_OUT = 2 * MAX_CHILDREN
"""A chain that runs its children twice."""
MAX_MODULES = 8
MAX_CALLS = 25
"""What one module may cost that calls others: loops over shared loops multiply."""


# -- how modules hand tensors to each other --


@dataclass
class Output:
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class FrozenOutput:
    tensors: tuple[torch.Tensor, ...]


NamedOutput = namedtuple("NamedOutput", ["tensors"])


@dataclass(frozen=True)
class Container:
    """How a module packs its tensors, and how the next one takes them out again."""

    pack: Callable[[tuple[torch.Tensor, ...]], Any]
    unpack: Callable[[Any], tuple[torch.Tensor, ...]]


def _by_attribute(kind: Callable[[Any], Any]) -> Container:
    return Container(kind, lambda value: value.tensors)


CONTAINERS = {
    "tensor": Container(lambda t: t[0] if len(t) == 1 else t, lambda v: (v,) if isinstance(v, torch.Tensor) else v),
    "tuple": Container(lambda t: t, lambda value: value),
    "list": Container(list, tuple),
    "dict": Container(lambda t: {f"out{i}": tensor for i, tensor in enumerate(t)}, lambda v: tuple(v.values())),
    "numbered dict": Container(lambda t: dict(enumerate(t)), lambda value: tuple(value.values())),
    "nested": Container(lambda t: ({"hidden": [t, None]}, 1), lambda value: value[0]["hidden"][0]),
    "namedtuple": _by_attribute(NamedOutput),
    "dataclass": _by_attribute(Output),
    "frozen dataclass": _by_attribute(FrozenOutput),
    "UserDict": Container(lambda t: UserDict(enumerate(t)), lambda value: tuple(value.values())),
}
"""``tensor`` hands a single tensor over bare, as most modules do."""


# -- the modules of a program --


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """One module. It refers to others by their index in ``Program.modules``, always a smaller one than its own.

    A module that several others refer to, or one refers to twice, is shared.
    """

    takes: str = "tensor"
    """The container of its input."""
    gives: str = "tensor"
    """The container of its output."""
    keyword: bool = False
    """Whether its input comes as a keyword argument."""
    leaf: bool = False
    """Whether it is declared a leaf: its whole subtree is gathered at once."""

    def uses(self) -> tuple[int, ...]:
        """The modules that become its children."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Dense(ModuleSpec):
    """Has parameters of its own: a weight of ``width * HIDDEN`` elements, and a bias of ``width``."""

    width: int = 1
    bias: bool = False
    frozen: bool = False


@dataclass(frozen=True, kw_only=True)
class Mlp(ModuleSpec):
    """Two ``nn.Linear``: the class for which ZeRO-3 has a function of its own."""

    width: int = 1
    frozen_up: bool = False


@dataclass(frozen=True, kw_only=True)
class Tied(ModuleSpec):
    """Has the weight of the Dense ``to`` as its own parameter."""

    to: int

    # ``to`` is not a child: it may be that only this module brings the weight into the model.


@dataclass(frozen=True, kw_only=True)
class Borrower(ModuleSpec):
    """Reads the weight of its child, the Dense ``lender``, in its forward (an external parameter) and never calls
    it."""

    lender: int

    def uses(self) -> tuple[int, ...]:
        return (self.lender,)


@dataclass(frozen=True, kw_only=True)
class Chain(ModuleSpec):
    """Its children in turn, ``times`` over. With ``gain``, its own parameter is used before and after them."""

    children: tuple[int, ...]
    times: int = 1
    gain: bool = False

    def uses(self) -> tuple[int, ...]:
        return self.children


@dataclass(frozen=True, kw_only=True)
class Branch(ModuleSpec):
    """Runs ``taken`` when the step's flag is set, else ``other`` or nothing."""

    flag: int
    taken: int
    other: int | None = None

    def uses(self) -> tuple[int, ...]:
        return (self.taken,) if self.other is None else (self.taken, self.other)


@dataclass(frozen=True, kw_only=True)
class Experts(ModuleSpec):
    """An ``nn.ModuleList``, of which those run that the step routes to, in that order. None is possible."""

    experts: tuple[int, ...]
    gain: bool = False

    def uses(self) -> tuple[int, ...]:
        return self.experts


@dataclass(frozen=True, kw_only=True)
class Pair(ModuleSpec):
    """Returns the tensors of two children; with ``second_used`` false, nobody looks at the second."""

    first: int
    second: int
    second_used: bool = True

    def uses(self) -> tuple[int, ...]:
        return (self.first, self.second)


@dataclass(frozen=True, kw_only=True)
class Checkpointed(ModuleSpec):
    """Its child under ``torch.utils.checkpoint``."""

    child: int
    reentrant: bool = False

    def uses(self) -> tuple[int, ...]:
        return (self.child,)


# -- what is run on them --


class Mode(enum.Enum):
    """What a step does. Its repr is the source that names it, so that a program can be pasted."""

    TRAIN = "forward, backward, optimizer step"
    EVAL = "forward without grad"
    FORWARD = "forward with grad, of which nothing is made"

    def __repr__(self) -> str:
        return str(self)


class Place(enum.Enum):
    FORWARD = "when the module is entered"
    BACKWARD = "when the gradient of the module's output arrives"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Fault:
    """An exception of the user's code at a module; if the pass does not come to that module, at its end."""

    module: int
    place: Place = Place.FORWARD


@dataclass(frozen=True)
class Situation:
    """What one rank meets in a step: its data, and where they lead it."""

    seed: int = 0
    rows: int = 1
    input_grad: bool = True
    flags: tuple[bool, ...] = (False,) * FLAGS
    routes: tuple[int, ...] = (0,)
    """Experts, modulo the number of experts of the module."""

    def leads_where(self, other: Situation) -> bool:
        return (self.flags, self.routes, self.input_grad) == (other.flags, other.routes, other.input_grad)

    def input(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.rows, HIDDEN, generator=generator).requires_grad_(self.input_grad)


@dataclass(frozen=True)
class Step:
    mode: Mode = Mode.TRAIN
    ranks: tuple[Situation, ...] = (Situation(),) * RANKS
    fault: Fault | None = None

    def __post_init__(self) -> None:
        if self.fault is None:
            return
        if self.fault.place is Place.BACKWARD and self.mode is not Mode.TRAIN:
            raise ValueError(f"a fault in backward needs a step that has one, got {self.mode}")
        if not all(situation.leads_where(self.ranks[0]) for situation in self.ranks):
            raise ValueError("a fault needs ranks that go the same way: it stands for one that all of them raise")


@dataclass(frozen=True)
class Budgets:
    """What the ds_config allows the runtime."""

    prefetch_numel: int = 0
    live_slack_numel: int | None = 10_000
    """How much more may be live than ``required_numel``; None allows less than any module needs."""
    reuse_distance_numel: int = 0
    persistence_threshold_numel: int = 0
    reduce_bucket_numel: int = 1_000
    accumulation: int = 1

    def max_live_numel(self, model: GraphModel) -> int:
        if self.live_slack_numel is None:
            return 1
        return max(1, required_numel(model, self.persistence_threshold_numel) + self.live_slack_numel)


@dataclass(frozen=True)
class Program:
    """A model (its last module is the body), budgets for it and steps to run on it."""

    modules: tuple[ModuleSpec, ...] = (Dense(),)
    budgets: Budgets = Budgets()
    adam: bool = False
    """AdamW, which moves parameters whose gradient is zero; otherwise SGD, whose steps are as large as the
    gradients."""
    steps: tuple[Step, ...] = (Step(),)
    gather: str = "collective"
    """``stage3_gather``."""

    def __post_init__(self) -> None:
        for number, spec in enumerate(self.modules):
            weights = [getattr(spec, name) for name in ("to", "lender") if hasattr(spec, name)]
            if any(not 0 <= used < number for used in (*spec.uses(), *weights)):
                raise ValueError(f"module {number} refers to one that is not before it: {spec}")
            if any(not isinstance(self.modules[used], Dense) for used in weights):
                raise ValueError(f"module {number} wants the weight of a module that is not a Dense: {spec}")
        if self.budgets.live_slack_numel is None and any(spec.leaf for spec in self.modules):
            raise ValueError("expected a budget that holds the leaf modules: a leaf over the budget is an error")


def source(value: object, indent: int = 0) -> str:
    """Python source that makes ``value``: dataclasses without the fields that have their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        arguments = [f"{f.name}={source(v, indent + 4)}" for f, v in fields if v != f.default]
        opening, closing = f"{type(value).__name__}(", ")"
    elif isinstance(value, tuple):
        arguments = [source(item, indent + 4) for item in value]
        opening, closing = "(", ",)" if len(value) == 1 else ")"
    else:
        return repr(value)
    line = f"{opening}{', '.join(arguments)}{closing}"
    if len(line) + indent <= 100 and "\n" not in line:
        return line
    lines = "".join(f"{' ' * (indent + 4)}{argument},\n" for argument in arguments)
    return f"{opening}\n{lines}{' ' * indent}{closing.lstrip(',')}"


# -- the model of a program --


class PlannedFault(Exception):
    """The exception of the user's code that a step asked for."""


@dataclass
class Control:
    """What all modules of one model look at to know where to go, and where to raise."""

    situation: Situation = field(default_factory=Situation)
    fault: Fault | None = None

    @contextlib.contextmanager
    def during(self, situation: Situation, fault: Fault | None) -> Iterator[None]:
        """Also around the backward: checkpointed modules run again in it."""
        self.situation, self.fault = situation, fault
        try:
            yield
        finally:
            self.fault = None

    def enter(self, number: int) -> None:
        if self.fault == Fault(number, Place.FORWARD):
            raise PlannedFault(f"in the forward of module {number}")

    def leave(self, number: int, outputs: tuple[torch.Tensor, ...]) -> None:
        if self.fault == Fault(number, Place.BACKWARD):
            self._raise_in_backward(outputs)

    def begin_body(self, x: torch.Tensor) -> None:
        """The gradient of ``x`` is the last that a backward comes to, and it always does."""
        if self.fault is not None and self.fault.place is Place.BACKWARD:
            self._raise_in_backward((x,))

    def end_body(self) -> None:
        if self.fault is not None and self.fault.place is Place.FORWARD:
            raise PlannedFault(f"at the end of a forward that did not come to module {self.fault.module}")

    def _raise_in_backward(self, outputs: tuple[torch.Tensor, ...]) -> None:
        def fail(grad: torch.Tensor) -> None:
            raise PlannedFault("in the backward")

        for output in outputs:
            if output.requires_grad:
                output.register_hook(fail)


class Block(nn.Module):
    """A module of a program: takes its input out of the container, and packs what ``compute`` makes of it."""

    def __init__(self, number: int, spec: ModuleSpec, control: Control) -> None:
        super().__init__()
        self.number = number
        self.spec = spec
        self.control = control

    def forward(self, packed: Any) -> Any:
        self.control.enter(self.number)
        (x_RD,) = CONTAINERS[self.spec.takes].unpack(packed)
        outputs = self.compute(x_RD)
        self.control.leave(self.number, outputs)
        return CONTAINERS[self.spec.gives].pack(outputs)

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def result(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What a caller makes of the outputs."""
        (y_RD,) = outputs
        return y_RD


def call(block: Block, x_RD: torch.Tensor) -> torch.Tensor:
    """Call the block as its spec wants to be called."""
    packed = CONTAINERS[block.spec.takes].pack((x_RD,))
    given = block(packed=packed) if block.spec.keyword else block(packed)
    return block.result(CONTAINERS[block.spec.gives].unpack(given))


def _residual(x_RD: torch.Tensor, weight_WD: torch.Tensor, bias_W: torch.Tensor | None = None) -> torch.Tensor:
    """Bounded, and never blind to its input, whatever W is."""
    inner_RW = torch.tanh(nn.functional.linear(x_RD, weight_WD, bias_W))
    return torch.tanh(x_RD + inner_RW @ weight_WD)


class DenseBlock(Block):
    def __init__(self, number: int, spec: Dense, control: Control) -> None:
        super().__init__(number, spec, control)
        self.weight = nn.Parameter(torch.randn(spec.width, HIDDEN) / 2, requires_grad=not spec.frozen)
        self.bias = nn.Parameter(torch.randn(spec.width), requires_grad=not spec.frozen) if spec.bias else None

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_residual(x_RD, self.weight, self.bias),)


class MlpBlock(Block):
    def __init__(self, number: int, spec: Mlp, control: Control) -> None:
        super().__init__(number, spec, control)
        self.up = nn.Linear(HIDDEN, spec.width).requires_grad_(not spec.frozen_up)
        self.down = nn.Linear(spec.width, HIDDEN)

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.tanh(x_RD + self.down(torch.tanh(self.up(x_RD)))),)


class TiedBlock(Block):
    def __init__(self, number: int, spec: Tied, control: Control, weight: nn.Parameter) -> None:
        super().__init__(number, spec, control)
        self.weight = weight

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_residual(x_RD, self.weight),)


class BorrowerBlock(Block):
    def __init__(self, number: int, spec: Borrower, control: Control, lender: DenseBlock) -> None:
        super().__init__(number, spec, control)
        self.lender = lender

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_residual(x_RD, self.lender.weight),)


class ParentBlock(Block):
    """Has children, and perhaps a parameter of its own."""

    def __init__(
        self, number: int, spec: ModuleSpec, control: Control, children: list[Block], gain: bool = False
    ) -> None:
        super().__init__(number, spec, control)
        self.parts = nn.ModuleList(children)
        self.gain = nn.Parameter(1 + torch.randn(HIDDEN) / 4) if gain else None

    def amplified(self, x_RD: torch.Tensor) -> torch.Tensor:
        return x_RD if self.gain is None else x_RD * self.gain


class ChainBlock(ParentBlock):
    def __init__(self, number: int, spec: Chain, control: Control, children: list[Block]) -> None:
        super().__init__(number, spec, control, children, spec.gain)
        self.times = spec.times

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y_RD = self.amplified(x_RD)
        for _ in range(self.times):
            for part in self.parts:
                y_RD = call(part, y_RD)
        return (self.amplified(y_RD),)


class BranchBlock(ParentBlock):
    def __init__(self, number: int, spec: Branch, control: Control, children: list[Block]) -> None:
        super().__init__(number, spec, control, children)
        self.flag = spec.flag

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        way = 0 if self.control.situation.flags[self.flag] else 1
        return (call(self.parts[way], x_RD) if way < len(self.parts) else x_RD,)


class ExpertsBlock(ParentBlock):
    def __init__(self, number: int, spec: Experts, control: Control, children: list[Block]) -> None:
        super().__init__(number, spec, control, children, spec.gain)

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y_RD = self.amplified(x_RD)
        for route in self.control.situation.routes:
            y_RD = y_RD + call(self.parts[route % len(self.parts)], x_RD) / 2
        return (torch.tanh(y_RD),)


class PairBlock(ParentBlock):
    def __init__(self, number: int, spec: Pair, control: Control, children: list[Block]) -> None:
        super().__init__(number, spec, control, children)
        self.second_used = spec.second_used

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.parts
        return call(first, x_RD), call(second, x_RD)

    def result(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        first_RD, second_RD = outputs
        return torch.tanh(first_RD - second_RD / 2) if self.second_used else first_RD


class CheckpointedBlock(ParentBlock):
    def __init__(self, number: int, spec: Checkpointed, control: Control, children: list[Block]) -> None:
        super().__init__(number, spec, control, children)
        self.reentrant = spec.reentrant

    def compute(self, x_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (child,) = self.parts
        return (checkpoint(call, child, x_RD, use_reentrant=self.reentrant),)


_PARENTS: dict[type[ModuleSpec], Callable[..., ParentBlock]] = {
    Chain: ChainBlock,
    Branch: BranchBlock,
    Experts: ExpertsBlock,
    Pair: PairBlock,
    Checkpointed: CheckpointedBlock,
}


def _blocks(specs: tuple[ModuleSpec, ...], control: Control) -> list[Block]:
    blocks: list[Block] = []
    for number, spec in enumerate(specs):
        if isinstance(spec, Dense):
            block: Block = DenseBlock(number, spec, control)
        elif isinstance(spec, Mlp):
            block = MlpBlock(number, spec, control)
        elif isinstance(spec, Tied):
            block = TiedBlock(number, spec, control, blocks[spec.to].weight)
        elif isinstance(spec, Borrower):
            block = BorrowerBlock(number, spec, control, blocks[spec.lender])
        else:
            block = _PARENTS[type(spec)](number, spec, control, [blocks[used] for used in spec.uses()])
        blocks.append(block)
    return blocks


class GraphModel(nn.Module):
    """The model of a program. Its stem gives every program something to train, and the body an input with grad."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.control = Control()
            self.stem = nn.Linear(HIDDEN, HIDDEN)
            self.body = _blocks(program.modules, self.control)[-1]

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        x_RD = torch.tanh(self.stem(x_RD))
        self.control.begin_body(x_RD)
        y_RD = call(self.body, x_RD)
        self.control.end_body()
        return y_RD

    def leaves(self) -> list[Block]:
        """The modules that the program declares as leaves."""
        return [module for module in self.modules() if isinstance(module, Block) and module.spec.leaf]


def required_numel(model: GraphModel, persistence_threshold_numel: int) -> int:
    """Elements that have to be whole at once: the most that a module needs together with those that enclose it.

    Parameters up to the threshold are persistent, and do not count. A weight that is read through another module is
    held by whoever is running when that is found out, which may be the whole model.
    """

    def most(module: nn.Module, enclosing: frozenset[nn.Parameter]) -> int:
        at_once = isinstance(module, Block) and (
            module.spec.leaf
            or isinstance(module.spec, Borrower)
            # The backward of the last module in it starts a second forward of all the others.
            or (isinstance(module.spec, Checkpointed) and not module.spec.reentrant)
        )
        here = enclosing | {p for p in module.parameters(recurse=at_once) if p.numel() > persistence_threshold_numel}
        children = [] if at_once else list(module.children())
        return max([sum(p.numel() for p in here), *(most(child, here) for child in children)])

    # Whose backward was the last one before a recomputation is held until the next backward tells that it is over.
    checkpointed = any(
        isinstance(module, Block) and isinstance(module.spec, Checkpointed) for module in model.modules()
    )
    held_over = max((most(block, frozenset()) for block in model.modules() if isinstance(block, Block)), default=0)
    borrowed = {block.lender.weight for block in model.modules() if isinstance(block, BorrowerBlock)}
    at_once = most(model, frozenset(p for p in borrowed if p.numel() > persistence_threshold_numel))
    in_all = sum(p.numel() for p in model.parameters() if p.numel() > persistence_threshold_numel)
    return min(in_all, at_once + (held_over if checkpointed else 0))


# -- drawing programs --


@dataclass(frozen=True)
class Scope:
    """What the programs that are drawn may contain."""

    containers: tuple[str, ...] = tuple(CONTAINERS)
    min_width: int = 0
    """0 allows parameters without elements."""
    one_way: bool = False
    """All ranks go the same way in all steps."""
    faults: bool = True
    starved: bool = True
    """Whether the budget of live parameters may be less than a module needs."""


EVERYTHING = Scope()
_RARELY = st.sampled_from((False, False, True))


@st.composite
def programs(draw: st.DrawFn, scope: Scope = EVERYTHING) -> Program:
    modules = draw(_module_graphs(scope))
    budgets = draw(_budgets(scope, leaves=any(spec.leaf for spec in modules)))
    way = draw(_situations(scope)) if scope.one_way else None
    steps = draw(st.lists(_steps(scope, len(modules), way), min_size=1, max_size=5))
    return Program(modules, budgets, draw(st.booleans()), tuple(steps), draw(st.sampled_from(GATHER_MODES)))


@st.composite
def _module_graphs(draw: st.DrawFn, scope: Scope) -> tuple[ModuleSpec, ...]:
    """Modules, of which the last one encloses every other one."""
    specs: list[ModuleSpec] = []
    calls: list[int] = []
    for _ in range(draw(st.integers(1, MAX_MODULES - 1))):
        spec = draw(_module_specs(scope, specs, calls))
        specs.append(spec)
        calls.append(_calls(spec, calls))
    used = {number for spec in specs for number in spec.uses()}
    loose = tuple(number for number in range(len(specs)) if number not in used)
    if len(loose) > 1 or draw(st.booleans()):
        specs.append(Chain(children=loose, gain=draw(st.booleans())))
    return tuple(specs)


def _calls(spec: ModuleSpec, calls: list[int]) -> int:
    """The most modules that one call of this one calls, itself included."""
    if isinstance(spec, Borrower):
        return 1
    inner = [calls[number] for number in spec.uses()]
    if isinstance(spec, Experts):
        return 1 + MAX_ROUTES * max(inner)
    return 1 + (spec.times if isinstance(spec, Chain) else 1) * sum(inner)


@st.composite
def _module_specs(draw: st.DrawFn, scope: Scope, before: list[ModuleSpec], calls: list[int]) -> ModuleSpec:
    dense = [number for number, spec in enumerate(before) if isinstance(spec, Dense)]
    cheap = [number for number in range(len(before)) if 1 + MAX_FAN_OUT * calls[number] <= MAX_CALLS]
    kinds: list[type[ModuleSpec]] = [Dense, Mlp]
    if dense:
        kinds += [Tied, Borrower]
    if cheap:
        kinds += _PARENTS
    kind = draw(st.sampled_from(kinds))
    fields = _own_fields(kind, scope, tuple(dense), tuple(cheap))
    # Building the strategies of all kinds, and drawing from one, would cost more than running the program.
    return kind(**{name: draw(strategy) for name, strategy in {**_common_fields(scope), **fields}.items()})


@functools.cache
def _common_fields(scope: Scope) -> dict[str, st.SearchStrategy[Any]]:
    containers = st.sampled_from(("tensor",) * len(scope.containers) + scope.containers)
    return {"takes": containers, "gives": containers, "keyword": _RARELY, "leaf": _RARELY}


@functools.cache
def _own_fields(
    kind: type[ModuleSpec], scope: Scope, dense: tuple[int, ...], cheap: tuple[int, ...]
) -> dict[str, st.SearchStrategy[Any]]:
    if kind is Dense:
        return {"width": st.integers(scope.min_width, 9), "bias": st.booleans(), "frozen": _RARELY}
    if kind is Mlp:
        return {"width": st.integers(1, 5), "frozen_up": _RARELY}
    if kind is Tied:
        return {"to": st.sampled_from(dense)}
    if kind is Borrower:
        return {"lender": st.sampled_from(dense)}
    one = st.sampled_from(cheap)
    some = st.lists(one, min_size=1, max_size=MAX_CHILDREN).map(tuple)
    if kind is Chain:
        return {"children": some, "times": st.integers(1, 2), "gain": st.booleans()}
    if kind is Branch:
        return {"flag": st.integers(0, FLAGS - 1), "taken": one, "other": st.none() | one}
    if kind is Experts:
        return {"experts": some, "gain": st.booleans()}
    if kind is Pair:
        return {"first": one, "second": one, "second_used": st.booleans()}
    return {"child": one, "reentrant": st.booleans()}


@functools.cache
def _budgets(scope: Scope, *, leaves: bool) -> st.SearchStrategy[Budgets]:
    slack: list[int | None] = [10_000, 50, 0]
    if scope.starved and not leaves:
        slack.append(None)
    return st.builds(
        Budgets,
        prefetch_numel=st.sampled_from((0, 30, 100, 10_000)),
        live_slack_numel=st.sampled_from(slack),
        reuse_distance_numel=st.sampled_from((0, 100, 10_000)),
        persistence_threshold_numel=st.sampled_from((0, 8, 40, 10_000)),
        reduce_bucket_numel=st.sampled_from((1_000, 100)),
        accumulation=st.integers(1, 2),
    )


@functools.cache
def _situations(scope: Scope) -> st.SearchStrategy[Situation]:
    return st.builds(
        Situation,
        seed=st.integers(0, 99),
        rows=st.integers(1, 3),
        input_grad=st.sampled_from((True, False)),
        flags=st.tuples(*[st.booleans()] * FLAGS),
        routes=st.lists(st.integers(0, 2), min_size=1 if scope.one_way else 0, max_size=MAX_ROUTES).map(tuple),
    )


@st.composite
def _steps(draw: st.DrawFn, scope: Scope, modules: int, way: Situation | None) -> Step:
    mode = draw(st.sampled_from(Mode))
    fault = None
    if scope.faults and draw(st.sampled_from((False, False, False, True))):
        places = [Place.FORWARD, Place.BACKWARD] if mode is Mode.TRAIN else [Place.FORWARD]
        fault = Fault(draw(st.integers(0, modules - 1)), draw(st.sampled_from(places)))
    first = draw(_situations(scope))
    alike = way is not None or fault is not None or draw(st.booleans())
    leader = way or first
    ranks = [first, draw(_situations(scope))]
    if alike:
        ranks = [
            dataclasses.replace(situation, flags=leader.flags, routes=leader.routes, input_grad=leader.input_grad)
            for situation in ranks
        ]
    return Step(mode, tuple(ranks), fault)
