"""Programs are values that survive pickling and printing, and their models do what the specs say."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings

from tests import module_graphs
from tests.module_graphs import (
    HIDDEN,
    Borrower,
    Branch,
    Budgets,
    Chain,
    Checkpointed,
    Dense,
    Experts,
    Fault,
    GraphModel,
    Mlp,
    Mode,
    Pair,
    Place,
    PlannedFault,
    Program,
    Situation,
    Step,
    Tied,
    call,
    programs,
    required_numel,
    source,
)

DENSE_3 = Dense(width=3, bias=True)
ROOT_NUMEL = HIDDEN * HIDDEN + HIDDEN
"""The stem: the model itself has no parameters."""


def run(model: GraphModel, situation: Situation, fault: Fault | None = None, *, backward: bool = False) -> torch.Tensor:
    with model.control.during(situation, fault):
        output = model(situation.input())
        if backward:
            output.square().mean().backward()
    return output


def body_grads(*modules: module_graphs.ModuleSpec, situation: Situation | None = None) -> dict[str, bool]:
    """Which parameters of the body get a gradient."""
    model = GraphModel(Program(modules))
    run(model, situation or Situation(), backward=True)
    return {name: parameter.grad is not None for name, parameter in model.body.named_parameters()}


@settings(max_examples=200, deadline=None)
@given(program=programs())
def test_programs_survive_pickling_and_printing(program: Program) -> None:
    assert pickle.loads(pickle.dumps(program)) == program
    assert eval(source(program), vars(module_graphs)) == program


@settings(max_examples=200, deadline=None)
@given(program=programs())
def test_every_step_of_a_program_does_what_it_says(program: Program) -> None:
    model = GraphModel(program)
    for step in program.steps:
        for situation in step.ranks:
            model.zero_grad()
            if step.fault is not None:
                with pytest.raises(PlannedFault):
                    run(model, situation, step.fault, backward=step.mode is Mode.TRAIN)
            output = run(model, situation, backward=True)
            assert torch.isfinite(output).all()
            assert model.stem.weight.grad is not None


@settings(max_examples=50, deadline=None)
@given(program=programs())
def test_models_of_one_program_and_their_copies_are_equal(program: Program) -> None:
    model = GraphModel(program)
    copied = copy.deepcopy(model)
    situation = program.steps[0].ranks[0]
    expected = run(model, situation)
    assert torch.equal(run(copied, situation), expected)
    assert torch.equal(run(GraphModel(program), situation), expected)
    assert copied.control is not model.control


@settings(max_examples=100, deadline=None)
@given(program=programs())
def test_budget_holds_each_parameter_that_is_not_persistent(program: Program) -> None:
    model = GraphModel(program)
    threshold = program.budgets.persistence_threshold_numel
    counted = [p.numel() for p in model.parameters() if p.numel() > threshold]
    assert max(counted, default=0) <= required_numel(model, threshold) <= sum(counted)


@pytest.mark.parametrize(
    ("modules", "expected_numel"),
    [
        pytest.param((DENSE_3,), ROOT_NUMEL, id="the stem is the largest"),
        pytest.param((Dense(width=20),), 160, id="one module"),
        pytest.param((Dense(width=20), Chain(children=(0,), gain=True)), 168, id="with what encloses it"),
        pytest.param((Dense(width=20), Dense(width=30), Chain(children=(0, 1, 0))), 240, id="the larger child"),
        pytest.param((Dense(width=20), Dense(width=30), Chain(children=(0, 1), leaf=True)), 400, id="a leaf at once"),
        pytest.param((Dense(width=20), Tied(to=0), Chain(children=(0, 1), leaf=True)), 160, id="tied weights once"),
        pytest.param(
            (Dense(width=20, bias=True), Borrower(lender=0)),
            232,
            id="the lender with the borrower, held by the model at first",
        ),
    ],
)
def test_required_numel(modules: tuple[module_graphs.ModuleSpec, ...], expected_numel: int) -> None:
    assert required_numel(GraphModel(Program(modules)), 0) == expected_numel


def test_persistent_parameters_are_not_required() -> None:
    assert required_numel(GraphModel(Program((Dense(width=20, bias=True),))), 20) == 160


def test_tied_and_shared_parameters_are_one() -> None:
    model = GraphModel(Program((DENSE_3, Tied(to=0), Borrower(lender=0), Chain(children=(0, 1, 2, 0)))))
    assert len(list(model.body.parameters())) == 2


def test_branch_uses_what_its_flag_says() -> None:
    modules = (Dense(), Dense(), Branch(flag=1, taken=0, other=1))
    assert list(body_grads(*modules, situation=Situation(flags=(False, True))).values()) == [True, False]
    assert list(body_grads(*modules, situation=Situation(flags=(True, False))).values()) == [False, True]


@pytest.mark.parametrize("routes", [(), (1,), (2, 0), (4, 4)])
def test_experts_use_what_is_routed_to(routes: tuple[int, ...]) -> None:
    used = body_grads(Dense(), Dense(), Dense(), Experts(experts=(0, 1, 2)), situation=Situation(routes=routes))
    assert [number for number, has_grad in enumerate(used.values()) if has_grad] == sorted({r % 3 for r in routes})


def test_second_output_of_a_pair_may_be_unused() -> None:
    assert list(body_grads(Dense(), Dense(), Pair(first=0, second=1)).values()) == [True, True]
    assert list(body_grads(Dense(), Dense(), Pair(first=0, second=1, second_used=False)).values()) == [True, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_number(reentrant: bool) -> None:
    plain, checkpointed = (
        GraphModel(Program((DENSE_3, Mlp(), Chain(children=(0, 1)), last)))
        for last in (Chain(children=(2,)), Checkpointed(child=2, reentrant=reentrant))
    )
    assert torch.equal(run(plain, Situation(), backward=True), run(checkpointed, Situation(), backward=True))
    for expected, actual in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)


@pytest.mark.parametrize("name", module_graphs.CONTAINERS)
def test_containers_change_no_number(name: str) -> None:
    x = Situation().input()
    bare, packed = (
        GraphModel(Program((Dense(), Dense(takes=name, gives=name, keyword=True), Pair(first=0, second=1, gives=name))))
        if packed
        else GraphModel(Program((Dense(), Dense(), Pair(first=0, second=1))))
        for packed in (False, True)
    )
    assert torch.equal(call(packed.body, x), call(bare.body, x))


@pytest.mark.parametrize("place", Place)
def test_fault_at_a_module_that_is_not_run_comes_at_the_end(place: Place) -> None:
    model = GraphModel(Program((Dense(), Branch(flag=0, taken=0))))
    with pytest.raises(PlannedFault):
        run(model, Situation(), Fault(0, place), backward=True)
    run(model, Situation(), backward=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Program((Chain(children=(0,)),)), "not before it"),
        (lambda: Program((Mlp(), Tied(to=0))), "not a Dense"),
        (lambda: Program((Dense(leaf=True),), Budgets(live_slack_numel=None)), "leaf over the budget"),
        (lambda: Step(Mode.EVAL, fault=Fault(0, Place.BACKWARD)), "needs a step that has one"),
        (lambda: Step(ranks=(Situation(), Situation(routes=())), fault=Fault(0)), "go the same way"),
    ],
)
def test_programs_without_a_meaning_are_rejected(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
