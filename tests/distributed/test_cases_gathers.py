"""What a gather brings: the right values every time (C22), aligned (C23), and many small parameters at once (C24)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.comparisons import EXACT, Tolerance, assert_released
from tests.distributed.twins import LR, Traffic, Twins
from tests.harness import distributed
from tests.models import HIDDEN as LLAMA_HIDDEN
from tests.models import build, token_ids, zero3_config
from tests.moe import HIDDEN, hidden_states, seeded

OFFLOADS = ("none", "cpu")
ALIGNMENT_BYTES = 16
ODD_SIZES = ((3,), (5, 7), (1,), (2, 3, 5), (17,), (HIDDEN, HIDDEN), (7, 1), (4, 3, 3))
"""Eight parameters, most of them of sizes that no number of ranks divides evenly. Experts are the 3-D ones."""


def mean_square(step: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return output.square().mean()


def output_of(step: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return output


# -- many parameters in one module (C22) --


class ManyParameters(nn.Module):
    """Uses eight parameters of its own. Notes the byte offset of each from the alignment boundary before it."""

    def __init__(self) -> None:
        super().__init__()
        for number, size in enumerate(ODD_SIZES):
            self.register_parameter(f"weight_{number}", nn.Parameter(torch.randn(size)))
        self.offsets_bytes: list[int] = []

    def weights(self) -> list[nn.Parameter]:
        return [self.get_parameter(f"weight_{number}") for number in range(len(ODD_SIZES))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.offsets_bytes += [weight.data_ptr() % ALIGNMENT_BYTES for weight in self.weights()]
        for number, weight in enumerate(self.weights()):
            if weight.shape == (HIDDEN, HIDDEN):
                x = torch.tanh(x @ weight)
            else:
                x = x + (number + 1) * weight.square().mean() - weight.flatten()[-1]
        return x


class ListedParameters(ManyParameters):
    """The same parameters in a module of their own that has no forward, so that no hook announces them."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(super().weights())
        for number in range(len(ODD_SIZES)):
            delattr(self, f"weight_{number}")

    def weights(self) -> list[nn.Parameter]:
        return list(self.listed)


class ManyParametersTwice(nn.Module):
    def __init__(self, block_class: type[ManyParameters] = ManyParameters) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block_class() for _ in range(2))
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@distributed(world_size=(1, 2, 3))
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("block_class", [ManyParameters, ListedParameters])
def test_many_parameters_many_times(block_class: type[ManyParameters], offload: str) -> None:
    twins = Twins(seeded(partial(ManyParametersTwice, block_class)), zero3_config(offload=offload))
    for step in range(20):
        twins.compare_forward(partial(output_of, step), f"the output of forward {step}", EXACT)
        assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=(2, 3))
def test_parameters_of_one_module_come_in_one_gather() -> None:
    twins = Twins(seeded(ManyParametersTwice), zero3_config(stage3_prefetch_bucket_size=0))
    for step in range(4):
        before = Traffic.so_far(twins.engine)
        twins.compare_forward(partial(output_of, step), f"the output of forward {step}", EXACT)
        taken = Traffic.so_far(twins.engine) - before
        assert taken.gathers == 3
        assert taken.gathered_numel == sum(p.numel() for p in twins.plain.parameters())


# -- alignment (C23) --


@distributed(world_size=(1, 2, 3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_gathered_parameters_are_aligned(train: bool, offload: str, dtype: torch.dtype, rank: int) -> None:
    plain = seeded(ManyParametersTwice).to(dtype)
    config = zero3_config(offload=offload, lr=LR if train else None)
    twins = Twins(plain, {**config, "bf16": {"enabled": dtype is torch.bfloat16}})
    for step in range(3):
        # New weights are checked elsewhere; here it is only the first forward whose weights equal plain torch's.
        x = hidden_states(seed=10 * step + rank).to(dtype)
        if train:
            loss = twins.engine(x).float().square().mean()
            if step == 0:
                EXACT.check(loss.detach(), twins.plain(x).float().square().mean().detach(), "the first loss")
            twins.engine.backward(loss)
            twins.engine.step()
        else:
            with torch.no_grad():
                EXACT.check(twins.engine(x), twins.plain(x), f"the output of forward {step}")
    offsets_bytes = [block.offsets_bytes for block in twins.engine.module.blocks]
    assert offsets_bytes == [[0] * 3 * len(ODD_SIZES)] * 2


# -- many tiny experts (C24) --

EXPERTS = 128
EXPERT_WIDTH = 8
BLOCKS = 2
BLOCK_NUMEL = EXPERTS * 3 * (EXPERT_WIDTH**2 + EXPERT_WIDTH)


class TinyExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(EXPERT_WIDTH, EXPERT_WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class ManyExperts(nn.Module):
    """Every expert runs, one after another, with a share of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, EXPERT_WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleList(TinyExpert() for _ in range(EXPERTS)) for _ in range(BLOCKS))
        self.last = nn.Linear(EXPERT_WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.stack([expert(x) for expert in block]).mean(dim=0)
        return self.last(x)


def many_experts_config(**options: Any) -> dict[str, Any]:
    return zero3_config(
        stage3_prefetch_bucket_size=2 * BLOCK_NUMEL,
        stage3_max_live_parameters=4 * BLOCK_NUMEL,
        stage3_max_reuse_distance=0,
        **options,
    )


@distributed(world_size=(1, 2), timeout_s=60)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_forwards_of_many_experts(offload: str) -> None:
    twins = Twins(seeded(ManyExperts), many_experts_config(offload=offload))
    for step in range(4):
        twins.compare_forward(partial(output_of, step), f"the output of forward {step}")
        assert_released(twins.engine.module)


@distributed(world_size=2, timeout_s=60)
def test_a_block_of_many_experts_comes_in_one_gather() -> None:
    twins = Twins(seeded(ManyExperts), many_experts_config())
    for step in range(4):
        twins.compare_forward(partial(output_of, step), f"the output of forward {step}")
    before = Traffic.so_far(twins.engine)
    twins.compare_forward(partial(output_of, 4), "the output of forward 4")
    taken = Traffic.so_far(twins.engine) - before
    # One for each block, and one for each end of the model.
    assert taken.gathers <= BLOCKS + 2
    assert taken.gathered_numel == sum(p.numel() for p in twins.plain.parameters())
    # One as the forward begins and one as it ends.
    assert taken.rounds <= 2


@distributed(world_size=(1, 2), timeout_s=60)
def test_training_of_many_experts() -> None:
    twins = Twins(seeded(ManyExperts), many_experts_config(lr=LR))
    for step in range(3):
        twins.train(partial(mean_square, step), f"the loss of step {step}", Tolerance(rtol=1e-4, atol=1e-4))
        assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=2)
@pytest.mark.parametrize("gather", ["auto", "collective"])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_one_rank_alone_runs_what_all_have_gathered(trains: bool, gather: str, rank: int) -> None:
    """To write a sample to the log, or to save the embeddings that a prompt encoder makes."""
    plain = build("llama")
    config = zero3_config(gather=gather, lr=LR if trains else None)
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(plain), config=config)
    engine.eval()
    for turn in range(2):
        ids = token_ids(seed=10 * turn + rank)
        with torch.no_grad():
            EXACT.check(engine(input_ids=ids).logits, plain(input_ids=ids).logits, "the logits of each rank")
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                if rank == 0:
                    generated = engine.module.generate(ids, max_new_tokens=3, do_sample=False)
                    assert torch.equal(generated, plain.generate(ids, max_new_tokens=3, do_sample=False))
                    head = engine.module.lm_head(torch.ones(1, LLAMA_HIDDEN))
                    EXACT.check(head, plain.lm_head(torch.ones(1, LLAMA_HIDDEN)), "a module by itself")
    if gather == "collective" or trains:
        assert_released(engine.module)
