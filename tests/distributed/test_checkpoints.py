"""Checkpoints of ZeRO-3: saved by some ranks, loaded by as many or by others, and read by the base's tools.

What is compared is the model that was trained in plain torch all the way, never what was saved with what was loaded.
"""

from __future__ import annotations

import argparse
import copy
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from torch import nn

from tests.comparisons import Tolerance
from tests.harness import distributed
from tests.models import ADAM_EPS, WEIGHT_DECAY, zero3_config
from tests.rank_pool import RankPools

LR = 1e-2
ROWS = 6
"""Of a batch: as many for each of 1, 2 and 3 ranks."""
BEFORE = 2
"""Steps before the checkpoint is saved."""
STEPS = 5
TIMEOUT_S = 60.0
WEIGHTS = Tolerance(rtol=1e-4, atol=LR / 100)
"""A weight that was loaded with the wrong momentum, or trained with the wrong settings, is off by about ``LR``."""
LOSS = Tolerance(rtol=1e-4, atol=1e-5)
OF_BF16 = Tolerance(rtol=1e-2, atol=LR / 10)


@dataclass(frozen=True)
class Case:
    """Where things are kept."""

    offload: str = "none"
    """Parameters, and the optimizer where that is possible without files of its own."""
    gather: str = "collective"
    bf16: bool = False

    def __str__(self) -> str:
        return f"{self.offload} {self.gather}" + " bf16" * self.bf16

    @property
    def widths(self) -> tuple[int, int]:
        """Of the model. What is too small for a file stays in memory."""
        return (1040, 1031) if self.offload == "nvme" else (10, 7)

    @property
    def weights_tolerance(self) -> Tolerance:
        return OF_BF16 if self.bf16 else WEIGHTS

    @property
    def loss_tolerance(self) -> Tolerance:
        return OF_BF16 if self.bf16 else LOSS

    def config(self, folder: Path) -> dict[str, Any]:
        config = zero3_config(offload="cpu" if self.offload == "cpu" else "none", gather=self.gather)
        zero = config["zero_optimization"]
        zero["sub_group_size"] = 150
        if self.gather == "auto":
            zero["stage3_param_persistence_threshold"] = 8
        if self.offload == "nvme":
            zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder / "nvme"), "pin_memory": False}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.bf16:
            config["bf16"] = {"enabled": True}
        return {**config, "zero_force_ds_cpu_optimizer": False}


SLOW = pytest.mark.slow
EACH_CASE = pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case("cpu", "auto"),
        Case("nvme", "auto"),
        Case(bf16=True),
        *(pytest.param(case, marks=SLOW) for case in (Case("cpu"), Case("nvme"), Case("nvme", bf16=True))),
    ],
    ids=str,
)
OTHER_RANKS = pytest.mark.parametrize(
    ("saving_ranks", "loading_ranks"), [(2, 1), (2, 3), pytest.param(1, 2, marks=SLOW), pytest.param(3, 2, marks=SLOW)]
)


class Mixed(nn.Module):
    """Every kind of state: two groups of parameters, tied and frozen ones, odd sizes, buffers of several types."""

    counts: torch.Tensor
    scale: torch.Tensor

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.frozen = nn.Linear(width, inner)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(inner)
        self.up = nn.Linear(inner, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embedding(ids)))
        hidden = self.norm(hidden * self.scale.to(hidden.dtype))
        logits: torch.Tensor = self.head(torch.tanh(self.up(hidden)))
        return logits


def made(seed: int, case: Case) -> Mixed:
    """A model whose every value depends on ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Mixed(*case.widths)
        model.counts += seed
        model.scale += seed / 10
    return model


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """In bf16 the gradients that ranks average are rounded, which must not turn a step around."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": trained[:2], "lr": LR, "weight_decay": WEIGHT_DECAY},
            {"params": trained[2:], "lr": 3 * LR, "weight_decay": 0.0},
        ],
        eps=1.0 if case.bf16 else ADAM_EPS,
    )


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int, rows: slice = slice(None)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(11, (ROWS, 4), generator=generator)[rows]
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def trained_plainly(steps: int, case: Case) -> tuple[Mixed, list[torch.Tensor]]:
    """The model after so many steps, in fp32, and the loss of each step.

    bf16 trains as ZeRO does: what is computed in bf16 updates weights in fp32.
    """
    model = made(0, case)
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    model.to(dtype).to(torch.float32)
    optimizer = optimizer_of(model, case)
    losses = []
    for step in range(steps):
        running = copy.deepcopy(model).to(dtype)
        loss = loss_of(running, step)
        loss.backward()
        for parameter, of_running in zip(model.parameters(), running.parameters(), strict=True):
            parameter.grad = None if of_running.grad is None else of_running.grad.float()
        optimizer.step()
        model.counts += 1
        losses.append(loss.detach())
    return model, losses


def engine_of(seed: int, case: Case, folder: Path, **config: Any) -> deepspeed.DeepSpeedEngine:
    model = made(seed, case)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(model, case), config={**case.config(folder), **config}
    )
    return engine


def train(engine: deepspeed.DeepSpeedEngine, steps: Iterable[int], case: Case) -> None:
    """Train in step with plain torch, comparing the loss of all rows."""
    steps = list(steps)
    _, expected = trained_plainly(steps[-1] + 1, case)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in steps:
        loss = loss_of(engine, step, slice(rank, None, ranks))
        engine.backward(loss)
        engine.step()
        engine.module.counts += 1
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        case.loss_tolerance.check(total / ranks, expected[step], f"the loss of step {step}")


def compare(engine: deepspeed.DeepSpeedEngine, steps: int, case: Case) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        compare_states(engine.module.state_dict(), steps, case)


def compare_states(actual: dict[str, torch.Tensor], steps: int, case: Case) -> None:
    expected = trained_plainly(steps, case)[0].state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        case.weights_tolerance.check(actual[name].to(value.dtype), value, name)


def train_and_save(folder: Path, case: Case, **options: Any) -> None:
    engine = engine_of(0, case, folder)
    train(engine, range(BEFORE), case)
    engine.save_checkpoint(str(folder), tag="one", client_state={"epoch": 3}, **options)
    engine.destroy()


def load_and_train(folder: Path, case: Case) -> None:
    engine = engine_of(1, case, folder)
    path, client_state = engine.load_checkpoint(str(folder), tag="one")
    assert path is not None
    assert client_state["epoch"] == 3
    assert engine.global_steps == BEFORE
    compare(engine, BEFORE, case)
    train(engine, range(BEFORE, STEPS), case)
    compare(engine, STEPS, case)
    engine.destroy()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@EACH_CASE
def test_training_goes_on_where_it_was(case: Case, shared_dir: Path) -> None:
    train_and_save(shared_dir, case)
    load_and_train(shared_dir, case)


@OTHER_RANKS
@EACH_CASE
def test_training_goes_on_with_other_ranks(
    saving_ranks: int, loading_ranks: int, case: Case, rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools[saving_ranks].run(train_and_save, tmp_path, case, timeout_s=TIMEOUT_S)
    rank_pools[loading_ranks].run(load_and_train, tmp_path, case, timeout_s=TIMEOUT_S)


def to_universal(folder: Path) -> None:
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / "one"),
            output_folder=str(folder / "one_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


def load_universal(folder: Path, case: Case) -> None:
    engine = engine_of(1, case, folder, checkpoint={"load_universal": True})
    engine.load_checkpoint(str(folder))
    compare(engine, BEFORE, case)
    train(engine, range(BEFORE, STEPS), case)
    compare(engine, STEPS, case)
    engine.destroy()


@OTHER_RANKS
@EACH_CASE
def test_universal_checkpoint(
    saving_ranks: int, loading_ranks: int, case: Case, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Settings of each parameter group, steps of each sub-group, buffers and frozen weights are all in it."""
    rank_pools[saving_ranks].run(train_and_save, tmp_path, case, timeout_s=TIMEOUT_S)
    to_universal(tmp_path)
    rank_pools[loading_ranks].run(load_universal, tmp_path, case, timeout_s=TIMEOUT_S)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@EACH_CASE
@pytest.mark.parametrize("load_module_only", [False, True])
def test_weights_alone_of_an_earlier_checkpoint(load_module_only: bool, case: Case, shared_dir: Path) -> None:
    """The tag counts, and not which one is the latest. What the optimizer updates are the loaded weights."""
    engine = engine_of(0, case, shared_dir)
    train(engine, range(BEFORE), case)
    engine.save_checkpoint(str(shared_dir), tag="early")
    train(engine, range(BEFORE, STEPS), case)
    engine.save_checkpoint(str(shared_dir), tag="late")
    engine.destroy()
    other = engine_of(1, case, shared_dir)
    other.load_checkpoint(str(shared_dir), tag="early", load_optimizer_states=False, load_module_only=load_module_only)
    compare(other, BEFORE, case)
    for group in other.optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    loss = loss_of(other, 0)
    other.backward(loss)
    other.step()
    compare(other, BEFORE, case)


def infer(folder: Path, case: Case) -> None:
    config = case.config(folder)
    config["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=made(1, case), config=config)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    compare(engine, BEFORE, case)
    plain, _ = trained_plainly(BEFORE, case)
    with torch.no_grad():
        case.loss_tolerance.check(loss_of(engine, 7), loss_of(plain, 7), "the loss")
    engine.destroy()


@OTHER_RANKS
@EACH_CASE
def test_engine_that_only_infers_loads_what_was_trained(
    saving_ranks: int, loading_ranks: int, case: Case, rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools[saving_ranks].run(train_and_save, tmp_path, case, timeout_s=TIMEOUT_S)
    rank_pools[loading_ranks].run(infer, tmp_path, case, timeout_s=TIMEOUT_S)


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@EACH_CASE
def test_zero_to_fp32(case: Case, rank: int, shared_dir: Path) -> None:
    train_and_save(shared_dir / "checkpoint", case)
    compare_states(get_fp32_state_dict_from_zero_checkpoint(str(shared_dir / "checkpoint")), BEFORE, case)
    if rank == 0:
        convert_zero_checkpoint_to_fp32_state_dict(str(shared_dir / "checkpoint"), str(shared_dir / "whole"))
        compare_states(torch.load(shared_dir / "whole" / "pytorch_model.bin"), BEFORE, case)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("gather", ["collective", "auto"])
def test_files_hold_a_rank_s_own_part_alone(gather: str, rank: int, shared_dir: Path) -> None:
    """Memory that ranks share is not saved with a part of it."""
    case = Case("cpu", gather)
    train_and_save(shared_dir, case)
    model = made(0, case)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    room = 16_000
    """For what else is in a file: names, shapes, the ds_config."""
    folder = shared_dir / "one"
    assert (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").stat().st_size < 3 * 4 * trained // 2 + room
    assert (folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").stat().st_size < 4 * frozen // 2 + room


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("case", [Case(), Case("cpu", "auto"), Case(gather="auto"), Case("nvme", "auto")], ids=str)
def test_whole_state_on_rank_0(case: Case, rank: int, shared_dir: Path) -> None:
    """It is a copy: training goes on without it. Of an engine that only infers, too."""
    engine = engine_of(0, case, shared_dir)
    train(engine, range(BEFORE), case)
    state = engine._zero3_consolidated_16bit_state_dict()
    train(engine, range(BEFORE, STEPS), case)
    if rank == 0:
        compare_states(state, BEFORE, case)
        assert state["head.weight"] is state["embedding.weight"]
    compare(engine, STEPS, case)
    config = case.config(shared_dir)
    config["zero_optimization"].pop("offload_optimizer", None)
    inferring, *_ = deepspeed.initialize(model=trained_plainly(BEFORE, case)[0], config=config)
    state = inferring._zero3_consolidated_16bit_state_dict()
    with deepspeed.zero.GatheredParameters(list(inferring.module.parameters()), modifier_rank=0):
        for parameter in inferring.module.parameters() if rank == 0 else ():
            parameter.data.zero_()
    if rank == 0:
        compare_states(state, BEFORE, case)


def names_in(file: Path) -> set[str]:
    """The classes and functions that unpickling a file of torch.save looks up."""
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return {str(argument) for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_the_base_can_read_the_files(shared_dir: Path) -> None:
    """They name nothing that the base has not."""
    train_and_save(shared_dir, Case())
    names = {name for file in (shared_dir / "one").glob("*.pt") for name in names_in(file)}
    assert {name for name in names if name.startswith("deepspeed")} == {
        "deepspeed.runtime.zero.config ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler LossScaler",
    }


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("case", [Case(), Case("nvme", "auto")], ids=str)
def test_frozen_parameters_can_be_left_out(case: Case, shared_dir: Path) -> None:
    train_and_save(shared_dir, case, exclude_frozen_parameters=True)
    engine = engine_of(1, case, shared_dir)
    with pytest.raises(RuntimeError, match=r"it lacks \['frozen.bias', 'frozen.weight'\]"):
        engine.load_checkpoint(str(shared_dir), tag="one")
    other = engine_of(0, case, shared_dir)
    other.load_checkpoint(str(shared_dir), tag="one", load_module_strict=False)
    compare(other, BEFORE, case)
    train(other, range(BEFORE, STEPS), case)


def with_sgd(folder: Path, load: bool) -> None:
    model = made(int(load), Case())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    config = {**Case().config(folder), "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    plain = made(0, Case())
    of_plain = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    if load:
        engine.load_checkpoint(str(folder))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(STEPS if load else BEFORE):
        loss_of(plain, step).backward()
        of_plain.step()
        of_plain.zero_grad()
        if not load or step >= BEFORE:
            engine.backward(loss_of(engine, step, slice(rank, None, ranks)))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for (name, actual), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            WEIGHTS.check(actual.data, expected.data, name)
    if not load:
        engine.save_checkpoint(str(folder))


@OTHER_RANKS
def test_any_optimizer_with_other_ranks(
    saving_ranks: int, loading_ranks: int, rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools[saving_ranks].run(with_sgd, tmp_path, False, timeout_s=TIMEOUT_S)
    rank_pools[loading_ranks].run(with_sgd, tmp_path, True, timeout_s=TIMEOUT_S)


# -- what cannot be loaded --


def assert_trains(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """After a failure: from the undamaged checkpoint."""
    engine.load_checkpoint(str(folder), tag="one")
    train(engine, range(BEFORE, STEPS), Case())


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_checkpoint_that_is_not_there(shared_dir: Path) -> None:
    train_and_save(shared_dir, Case())
    engine = engine_of(1, Case(), shared_dir)
    with pytest.raises(FileNotFoundError, match=r"two: expected a checkpoint, found no such folder.*latest, one"):
        engine.load_checkpoint(str(shared_dir), tag="two")
    assert_trains(engine, shared_dir)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_checkpoint_of_another_model(shared_dir: Path) -> None:
    train_and_save(shared_dir, Case())
    model = made(1, Case())
    model.extra = nn.Linear(3, 3)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(model, Case()), config=Case().config(shared_dir)
    )
    with pytest.raises(RuntimeError, match=r"it lacks \['extra.bias', 'extra.weight'\]"):
        engine.load_checkpoint(str(shared_dir), tag="one")


def lose_the_file_of_rank_1(folder: Path) -> None:
    engine = engine_of(1, Case(), folder)
    lost = folder / "one" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    lost.rename(f"{lost}.away")
    with pytest.raises(FileNotFoundError, match="zero_pp_rank_1.*one of each rank that saved it"):
        engine.load_checkpoint(str(folder), tag="one")
    Path(f"{lost}.away").rename(lost)
    content = lost.read_bytes()
    lost.write_bytes(content[:-1000])
    other = engine_of(1, Case(), folder)
    with pytest.raises(RuntimeError, match="zero_pp_rank_1.*damaged"):
        other.load_checkpoint(str(folder), tag="one")
    lost.write_bytes(content)
    assert_trains(other, folder)


def test_files_that_are_missing_or_damaged(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools[2].run(train_and_save, tmp_path, Case(), timeout_s=TIMEOUT_S)
    rank_pools[1].run(lose_the_file_of_rank_1, tmp_path, timeout_s=TIMEOUT_S)


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_optimizer_with_other_groups(shared_dir: Path) -> None:
    train_and_save(shared_dir, Case())
    model = made(1, Case())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=Case().config(shared_dir))
    with pytest.raises(ValueError, match="parameter group"):
        engine.load_checkpoint(str(shared_dir), tag="one")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_rank_that_cannot_write_its_file(rank: int, shared_dir: Path) -> None:
    """All ranks get the error, the latest checkpoint is the one before, and training goes on."""
    engine = engine_of(0, Case(), shared_dir)
    train(engine, range(BEFORE), Case())
    engine.save_checkpoint(str(shared_dir), tag="one")
    # A folder in the place of the file: works for root too, whom no permission stops.
    in_the_way = shared_dir / "two" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if rank == 0:
        in_the_way.mkdir(parents=True)
    torch.distributed.barrier()
    with pytest.raises(OSError, match=r"two .*not complete.*rank 1: .*zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        engine.save_checkpoint(str(shared_dir), tag="two")
    assert (shared_dir / "latest").read_text() == "one"
    train(engine, range(BEFORE, STEPS), Case())
    torch.distributed.barrier()
    if rank == 0:
        in_the_way.rmdir()
    torch.distributed.barrier()
    engine.save_checkpoint(str(shared_dir), tag="two")
    other = engine_of(1, Case(), shared_dir)
    other.load_checkpoint(str(shared_dir))
    compare(other, STEPS, Case())
