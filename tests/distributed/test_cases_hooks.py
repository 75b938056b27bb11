"""What the hooks do for modules used in every way: forward and backward equal plain torch, and nothing stays behind.

C05, C06, C16 to C21, and their kinds. Containers (C15) have a file of their own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comparisons import EXACT, Tolerance, assert_released
from tests.distributed.twins import LR, Twins, statistics_of
from tests.harness import distributed
from tests.models import zero3_config
from tests.moe import HIDDEN, hidden_states, seeded

STEPS = 3
OFFLOADS = ("none", "cpu")
AFTER_TRAINING = Tolerance(atol=1e-3)
"""Weights differ by what the order of additions makes of them, see ``twins.WEIGHTS``."""


def linear() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN)


def mean_square(step: int, model: Any, rank: int) -> torch.Tensor:
    """The loss of a model that maps hidden states to hidden states."""
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return output.square().mean()


def assert_no_module_is_active(module: nn.Module) -> None:
    """Each module that said that it needs a parameter has said that it no longer does: uses are closed one for one."""
    active = [name for name, parameter in module.named_parameters() if parameter.ds_active_sub_modules]
    assert not active, f"parameters of modules that were entered and not left: {active}"


def train_and_compare(twins: Twins, steps: int = STEPS, loss_of: Callable[..., torch.Tensor] = mean_square) -> None:
    for step in range(steps):
        twins.train(partial(loss_of, step), f"the loss of step {step}")
        assert_released(twins.engine.module)
        assert_no_module_is_active(twins.engine.module)
    twins.compare_weights()


# -- every way to use a module --


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.shared(torch.relu(self.shared(x))))


class UsedInALoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + self.cell(x)
        return x


class UsedInsideItself(nn.Module):
    """Calls itself with a smaller depth, around a child of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self.inner(x) if depth == 0 else torch.relu(self.inner(self(x, depth - 1)))


class UsedInSeveralBranches(nn.Module):
    """One output goes three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x)
        return self.left(hidden) * torch.sigmoid(self.right(hidden)) + hidden


class OwnParameterAndChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.child = linear()
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x * self.scale) * self.scale + self.bias


class KeywordInputs(nn.Module):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)

        def forward(self, *, hidden: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return (hidden * mask) @ self.weight * scale

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(mask=torch.ones_like(x), hidden=x, scale=0.5)) + x
        return x


class NoTensorInput(nn.Module):
    """Positions come from a module that gets no tensor, and indices from one that returns integers."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, HIDDEN))

        def forward(self, length: int) -> torch.Tensor:
            return self.table[:length]

    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Parameter(torch.randn(HIDDEN))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = x @ self.score
            return scores, scores.argsort()

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.chooser, self.last = self.Positions(), self.Chooser(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, order = self.chooser(x + self.positions(x.shape[0]))
        return self.last(x[order] * scores[:, None])


class ViewsAndInPlace(nn.Module):
    """A module returns its input, another a view of it, and their caller writes into a result."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused_in_output = nn.Parameter(torch.randn(HIDDEN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.inner(x).chunk(2, dim=-1)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.halves, self.last = linear(), self.Same(), self.Halves(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.same(x))
        hidden += 1.0
        left, right = self.halves(self.same(hidden))
        hidden = self.last(torch.cat((right, left), dim=-1))
        hidden.relu_()
        return hidden


class WithoutGradInside(nn.Module):
    """A teacher runs without grad in the middle of a forward with grad, and a result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.probe = linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        hidden = self.student(x)
        self.probe(hidden)
        return hidden + self.student(target) - self.teacher(hidden.detach()).detach()


class ReadThroughAnotherModule(nn.Module):
    """The head reads the embedding's weight, as heads with tied weights do."""

    class Head(nn.Module):
        def __init__(self, source: nn.Linear) -> None:
            super().__init__()
            self._source = [source]
            self.bias = nn.Parameter(torch.zeros(HIDDEN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self._source[0].weight + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = linear(), linear()
        self.head = self.Head(self.first)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadThroughAnotherModule:
        twin = ReadThroughAnotherModule()
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(self.first(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = linear(), linear(), linear()
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


USES: tuple[type[nn.Module], ...] = (
    UsedTwice,
    UsedInALoop,
    UsedInsideItself,
    UsedInSeveralBranches,
    OwnParameterAndChildren,
    KeywordInputs,
    NoTensorInput,
    ViewsAndInPlace,
    WithoutGradInside,
    ReadThroughAnotherModule,
    Tied,
)
each_use = pytest.mark.parametrize("model_class", USES, ids=lambda model_class: model_class.__name__)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@each_use
def test_training(model_class: type[nn.Module], offload: str) -> None:
    train_and_compare(Twins(seeded(model_class), zero3_config(offload=offload, lr=LR)))


@distributed(world_size=(1, 2))
@each_use
def test_forward_adds_no_autograd_node(model_class: type[nn.Module], rank: int) -> None:
    x = hidden_states(seed=rank)
    plain = seeded(model_class)
    # Before ZeRO-3 puts a function of its own in the place of torch.nn.functional.linear.
    node_types = {type(plain(x).grad_fn)}
    twins = Twins(plain, zero3_config())
    for with_grad in (False, True, False):
        with torch.set_grad_enabled(with_grad):
            output, expected = twins.engine.module(x), twins.plain(x)
        EXACT.check(output, expected, "the output")
        assert type(output.grad_fn) in ({*node_types, type(expected.grad_fn)} if with_grad else {type(None)})
        assert output.requires_grad is expected.requires_grad


class Relay(nn.Module):
    """Keeps what its child was given and what it gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.child = linear()
        self.given: list[torch.Tensor] = []
        self.returned: list[torch.Tensor] = []
        self.child.register_forward_hook(lambda _, args, output: self._note(args[0], output))

    def _note(self, given: torch.Tensor, returned: torch.Tensor) -> None:
        self.given.append(given)
        self.returned.append(returned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passed = x * 2
        self.got = self.child(self.passed)
        return self.got


@distributed(world_size=(1, 2))
def test_tensors_pass_through_untouched_without_grad() -> None:
    engine, *_ = deepspeed.initialize(model=seeded(Relay), config=zero3_config())
    relay = engine.module
    with torch.no_grad():
        output = relay(hidden_states(0))
    assert relay.given[-1] is relay.passed
    assert relay.returned[-1] is relay.got
    assert output is relay.got


class ParameterStates(nn.Module):
    """Notes whether its weight is whole when its backward begins, once for each use."""

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
            ctx.note = note
            return output.view_as(output)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            ctx.note()
            return gradients[0], None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.whole_in_backward: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (HIDDEN, HIDDEN)
        return self.Probe.apply(x @ self.weight, lambda: self.whole_in_backward.append(self.weight.shape == shape))


class ProbedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ParameterStates() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = torch.relu(block(x))
        return x


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
def test_parameter_is_whole_in_each_backward(offload: str) -> None:
    twins = Twins(seeded(ProbedStack), zero3_config(offload=offload, lr=LR))
    train_and_compare(twins)
    uses = [block.whole_in_backward for block in twins.engine.module.blocks]
    assert uses == [[True] * STEPS * 2, [True] * STEPS, [True] * STEPS]


@distributed(world_size=2)
def test_gathers_are_as_many_as_uses_need() -> None:
    """A module used once is gathered once for the forward and once for the backward, whatever the graph looks like."""
    twins = Twins(
        seeded(UsedInSeveralBranches),
        zero3_config(lr=LR, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0),
    )
    train_and_compare(twins)
    before = statistics_of(twins.engine).gathered_numel
    twins.train(partial(mean_square, STEPS), f"the loss of step {STEPS}")
    whole_numel = sum(p.numel() for p in twins.plain.parameters())
    assert statistics_of(twins.engine).gathered_numel - before <= 2 * whole_numel


# -- frozen and adapted layers under both checkpoint kinds (C05) --


class FrozenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.trained = nn.LayerNorm(HIDDEN), linear(), linear()
        self.norm.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.trained(torch.relu(self.frozen(self.norm(x))))


class AdaptedBlock(nn.Module):
    """A frozen linear layer with a LoRA pair beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)))


class Checkpointed(nn.Module):
    def __init__(self, block_class: type[nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block_class() for _ in range(3))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Reentrant checkpointing gives no gradients to a block none of whose inputs asks for one.
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = block(x) if self._reentrant is None else checkpoint(block, x, use_reentrant=self._reentrant)
        return x


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["stored", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("block_class", [FrozenBlock, AdaptedBlock])
def test_frozen_layers_and_checkpoints(block_class: type[nn.Module], reentrant: bool | None, offload: str) -> None:
    plain = seeded(partial(Checkpointed, block_class, reentrant))
    train_and_compare(Twins(plain, zero3_config(offload=offload, lr=LR)))


# -- hooks taken off and put back (C06) --


@contextmanager
def without_hooks(engine: deepspeed.DeepSpeedEngine) -> Iterator[nn.Module]:
    """All parameters whole and all hooks off, as trl does around ``generate``."""
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for parameter in engine.module.parameters():
            parameter.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks = []
        offload.backward_hooks = []
        yield offload.module
        offload._register_deepspeed_module(offload.module)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("model_class", [UsedInALoop, OwnParameterAndChildren, Tied])
def test_hooks_removed_and_put_back(model_class: type[nn.Module], offload: str, rank: int) -> None:
    twins = Twins(seeded(model_class), zero3_config(offload=offload, lr=LR))
    for step in range(4):
        twins.train(partial(mean_square, step), f"the loss of step {step}")
        with without_hooks(twins.engine) as module, torch.no_grad():
            for seed in range(2):
                x = hidden_states(seed=100 + 10 * seed + rank)
                AFTER_TRAINING.check(module(x), twins.plain(x), f"the output without hooks after step {step}")
        assert_released(twins.engine.module)
    twins.compare_weights()


class GenerationFailed(Exception):
    pass


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("forward_of", ["engine", "module"])
def test_exception_while_hooks_are_removed(forward_of: str, offload: str, rank: int) -> None:
    """trl puts hooks back only after a `generate` that returns."""
    twins = Twins(seeded(OwnParameterAndChildren), zero3_config(offload=offload, lr=LR))
    hooks = count(hooks_of(twins.engine.module))
    for step in range(2):
        with pytest.raises(GenerationFailed), without_hooks(twins.engine) as module, torch.no_grad():
            module(hidden_states(seed=rank))
            raise GenerationFailed
        assert count(hooks_of(twins.engine.module)) == hooks
        with torch.no_grad():
            x = hidden_states(seed=10 + rank)
            called = twins.engine if forward_of == "engine" else twins.engine.module
            AFTER_TRAINING.check(called(x), twins.plain(x), f"the output before step {step}")
        twins.train(partial(mean_square, step), f"the loss of step {step}")
    assert_released(twins.engine.module)
    twins.compare_weights()


HookTable = dict[str, dict[str, list[object]]]


def hooks_of(model: nn.Module) -> HookTable:
    """All hooks of all modules: name of the module, name of the kind, the hooks in their order."""
    return {
        path: {kind: list(hooks.values()) for kind, hooks in vars(module).items() if kind.endswith("_hooks") and hooks}
        for path, module in model.named_modules()
    }


def model_with_hooks_of_the_user() -> nn.Module:
    model = nn.Sequential(linear(), nn.ReLU(), nn.Sequential(linear(), linear()))
    model[0].register_forward_pre_hook(keep_arguments)
    model[2].register_forward_hook(keep_output)
    model[2][1].register_full_backward_hook(keep_gradients)
    return model


def keep_arguments(module: nn.Module, args: Any) -> None:
    """A hook that changes nothing."""


def keep_output(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that changes nothing."""


def keep_gradients(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    """A hook that changes nothing."""


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("trained", [False, True], ids=["new", "after training"])
def test_destroy_restores_the_hooks(trained: bool) -> None:
    model = seeded(model_with_hooks_of_the_user)
    before = hooks_of(model)
    engine, *_ = deepspeed.initialize(model=model, config=zero3_config(lr=LR))
    if trained:
        engine.backward(mean_square(0, engine, rank=0))
        engine.step()
    engine.destroy()
    assert hooks_of(model) == before


@distributed(world_size=(1, 2))
def test_hooks_taken_off_and_put_back_are_the_same_number() -> None:
    model = seeded(model_with_hooks_of_the_user)
    before = hooks_of(model)
    engine, *_ = deepspeed.initialize(model=model, config=zero3_config(lr=LR))
    with_engine = hooks_of(model)
    children = [path for path in before if path]
    for _ in range(3):
        with without_hooks(engine):
            without = hooks_of(model)
            # The root may keep a hook that is in neither list.
            assert {path: without[path] for path in children} == {path: before[path] for path in children}
        assert count(hooks_of(model)) == count(with_engine)


def count(table: HookTable) -> dict[str, dict[str, int]]:
    return {path: {kind: len(hooks) for kind, hooks in kinds.items()} for path, kinds in table.items()}


# -- several losses, several backwards (C16) --


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(linear(), nn.ReLU(), linear())
        self.heads = nn.ModuleList(linear() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.trunk(x)
        return tuple(head(hidden).square().mean() for head in self.heads)


def both_losses(step: int, model: Any, rank: int) -> torch.Tensor:
    first, second = model(hidden_states(seed=10 * step + rank))
    return first + second


BackwardOf = Callable[[deepspeed.DeepSpeedEngine, Callable[[int], tuple[torch.Tensor, torch.Tensor]]], None]
"""Brings the gradient of the two losses' sum about; the second argument runs a forward of the given step."""


def backward_of_each_loss(engine: Any, losses_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    first, second = losses_of(0)
    engine.backward(first, retain_graph=True)
    engine.backward(second)


def backward_twice_over_one_graph(engine: Any, losses_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    first, second = losses_of(0)
    half = (first + second) / 2
    engine.backward(half, retain_graph=True)
    engine.backward(half)


def backward_of_the_sum(engine: Any, losses_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    first, second = losses_of(0)
    engine.backward(first + second)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(
    "backward", [backward_of_the_sum, backward_of_each_loss, backward_twice_over_one_graph], ids=lambda f: f.__name__
)
def test_two_losses(backward: BackwardOf, offload: str, rank: int, world_size: int) -> None:
    twins = Twins(seeded(TwoHeads), zero3_config(offload=offload, lr=LR))
    for step in range(STEPS):
        backward(twins.engine, lambda _, step=step: twins.engine(hidden_states(seed=10 * step + rank)))
        assert_released(twins.engine.module)
        twins.engine.step()
        twins.trainer.step_on([partial(both_losses, step, twins.plain, r) for r in range(world_size)])
    twins.compare_weights()


def losses_of_two_inputs(step: int, model: Any, rank: int) -> torch.Tensor:
    return both_losses(2 * step, model, rank) + both_losses(2 * step + 1, model, rank)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
def test_two_forwards_before_one_backward(offload: str) -> None:
    twins = Twins(seeded(TwoHeads), zero3_config(offload=offload, lr=LR))
    train_and_compare(twins, loss_of=losses_of_two_inputs)


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
def test_backward_through_a_freed_graph(offload: str, rank: int) -> None:
    """torch's own error, and the steps before and after it are right."""
    twins = Twins(seeded(TwoHeads), zero3_config(offload=offload, lr=LR))
    for step in range(STEPS):
        twins.train(partial(both_losses, 10 * step), f"the loss of step {step}")
        loss = both_losses(10 * step + 1, twins.engine, rank)
        twins.engine.backward(loss)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            twins.engine.backward(loss)
        twins.engine.zero_grad()
        twins.engine.optimizer.zero_grad()
        assert_released(twins.engine.module)
        twins.compare_forward(partial(both_losses, step), f"the losses after step {step}", AFTER_TRAINING)


@distributed(world_size=(1, 2))
def test_loss_of_an_inner_output() -> None:
    """The loss comes from a tensor that an inner module returned, and the root's own output is not used."""

    def inner_loss(step: int, model: Any, rank: int) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        module = getattr(model, "module", model)
        hook = module.inner.register_forward_hook(lambda _, args, output: kept.append(output))
        model(hidden_states(seed=10 * step + rank))
        hook.remove()
        return torch.stack([output.square().mean() for output in kept]).sum()

    train_and_compare(Twins(seeded(UsedInsideItself), zero3_config(lr=LR)), loss_of=inner_loss)


# -- parameters without elements (C17) --


class EmptyParts(nn.Module):
    """Parameters of zero elements at the beginning, among others in one module, and alone in a module."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.nothing.sum()

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(0))
        self.first, self.none, self.alone, self.last = linear(), nn.Linear(HIDDEN, 0), self.Alone(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x)) + self.before.sum()
        return self.last(self.alone(hidden)) + self.none(hidden).sum()


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
def test_parameters_without_elements(offload: str) -> None:
    train_and_compare(Twins(seeded(EmptyParts), zero3_config(offload=offload, lr=LR)))


@distributed(world_size=(1, 2))
def test_forwards_with_parameters_without_elements() -> None:
    twins = Twins(seeded(EmptyParts), zero3_config())
    for step in range(STEPS):
        twins.compare_forward(partial(mean_square, step), f"the output of forward {step}")
        assert_released(twins.engine.module)


# -- modules that come after initialize (C18) --


class Attachable(nn.Module):
    """Uses a LoRA pair if one is attached."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear()

    def attach(self) -> None:
        torch.manual_seed(1)
        self.lora_a = nn.Linear(HIDDEN, 2, bias=False)
        self.lora_b = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x)
        if hasattr(self, "lora_a"):
            output = output + self.lora_b(self.lora_a(x))
        return output


ADDED_MODULE_IS_NAMED = r"(?s)(?=.*\b1\.lora_[ab]\b)(?=.*deepspeed\.initialize)"
"""What the error says if an added module cannot be used: which one, and the call to make."""


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("seen_before", [False, True], ids=["at once", "after a step"])
def test_module_attached_after_initialize(seen_before: bool, train: bool, rank: int, world_size: int) -> None:
    twins = Twins(seeded(lambda: nn.Sequential(Attachable(), Attachable())))
    if seen_before:
        twins.train(partial(mean_square, 0), "the loss before")
    for model in (twins.engine.module, twins.plain):
        model[1].attach()
    x = hidden_states(seed=rank)
    try:
        if not train:
            with torch.no_grad():
                AFTER_TRAINING.check(twins.engine(x), twins.plain(x), "the output")
            return
        loss = twins.engine(x).square().mean()
        AFTER_TRAINING.check(loss.detach(), twins.plain(x).square().mean().detach(), "the loss")
        twins.engine.backward(loss)
        twins.engine.step()
    except RuntimeError as error:
        assert re.search(ADDED_MODULE_IS_NAMED, str(error)), str(error)
    else:
        # The optimizer was made before the pair, so it updates the rest only: as plain torch does.
        twins.trainer.step_on([partial(mean_square_of_inputs, twins.plain, r) for r in range(world_size)])
        added = ("1.lora_a.weight", "1.lora_b.weight")
        whole = {n: p for n, p in twins.engine.module.named_parameters() if n not in added}
        with deepspeed.zero.GatheredParameters(list(whole.values())):
            for name, parameter in whole.items():
                AFTER_TRAINING.check(parameter.data, twins.plain.get_parameter(name).data, name)


def mean_square_of_inputs(model: nn.Module, rank: int) -> torch.Tensor:
    return model(hidden_states(seed=rank)).square().mean()


# -- partitioned, and no engine (C19) --


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(20, HIDDEN), nn.LayerNorm(HIDDEN), linear()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.embedding(ids)))


IDS = torch.arange(6)
CALLS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "model": lambda model: model(IDS),
    "embedding": lambda model: model.get_submodule("embedding")(IDS),
    "norm": lambda model: model.get_submodule("norm")(hidden_states(0)),
    "linear": lambda model: model.get_submodule("last")(hidden_states(0)),
}


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("call", CALLS)
def test_partitioned_model_without_engine(call: str) -> None:
    with deepspeed.zero.Init(config_dict_or_path=zero3_config()):
        model = seeded(TokenModel)
    with pytest.raises(RuntimeError, match=r"(?s)(?=.*partitioned)(?=.*GatheredParameters)"):
        CALLS[call](model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        gathered = CALLS[call](model).detach()
    plain = TokenModel()
    plain.load_state_dict(expected)
    EXACT.check(gathered, CALLS[call](plain).detach(), "the output of the gathered model")
    engine, *_ = deepspeed.initialize(model=model, config=zero3_config())
    with torch.no_grad():
        EXACT.check(engine(IDS), plain(IDS), "the output of the engine")


# -- leaf blocks with two outputs (C20) --


class RouterBlock(nn.Module):
    """Returns hidden states and router logits, as the blocks of MoE models do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.router(x)
        weights = torch.softmax(logits, dim=-1)
        mixed = sum(weights[:, n, None] * torch.relu(expert(x)) for n, expert in enumerate(self.experts))
        return x + mixed, logits


class RouterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.blocks = nn.ModuleList(RouterBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        balance = torch.zeros(())
        for block in self.blocks:
            x, logits = block(x)
            balance = balance + logits.square().mean()
        return x.square().mean() + 0.1 * balance


def own_loss(step: int, model: Any, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return loss


@distributed(world_size=(1, 2), timeout_s=60)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("leaf", [False, True], ids=["modules", "leaf block"])
def test_blocks_with_two_outputs(leaf: bool, offload: str) -> None:
    plain = seeded(RouterModel)
    marked = copy.deepcopy(plain)
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(marked, [RouterBlock])
    twins = Twins(marked, zero3_config(offload=offload, lr=LR))
    # Rounding adds up over the steps.
    for step in range(50):
        twins.train(partial(own_loss, step), f"the loss of step {step}", Tolerance(rtol=1e-4, atol=1e-4))
        assert_released(twins.engine.module)
    twins.compare_weights()


# -- one handle for two parameters (C21) --


@distributed(world_size=(1, 2))
def test_handle_is_waited_for_twice() -> None:
    with deepspeed.zero.Init(config_dict_or_path=zero3_config()):
        model = nn.Sequential(linear(), nn.Linear(HIDDEN, 3))
    parameters = [model[0].weight, model[1].weight]
    handle = parameters[0].all_gather_coalesced(parameters)
    handle.wait()
    values = [parameter.detach().clone() for parameter in parameters]
    assert [parameter.ds_status for parameter in parameters] == [ZeroParamStatus.AVAILABLE] * 2
    parameters[0].partition(parameters)
    handle.wait()
    assert [parameter.ds_status for parameter in parameters] == [ZeroParamStatus.NOT_AVAILABLE] * 2
    with deepspeed.zero.GatheredParameters(parameters):
        for parameter, value in zip(parameters, values, strict=True):
            EXACT.check(parameter.data, value, "a weight that was released and gathered again")
