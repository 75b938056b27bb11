"""Ranks of a node that read each other's partitions: each at its own pace, with weights that change, and when one dies.

Where one rank has to wait for another's progress, it waits for a key in the group's store, so that no test depends on
how fast anything is.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import pytest
import torch
from deepspeed.runtime.zero import gather_mode
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.lockstep import LockstepError
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from transformers.integrations import HfDeepSpeedConfig

from tests.comparisons import EXACT, assert_released, assert_same_weights
from tests.distributed.test_nvme import Stack, hidden, nvme_config
from tests.distributed.twins import LR, Twins, statistics_of
from tests.harness import distributed
from tests.models import build, token_ids, zero3_config
from tests.moe import RoutedModel, hidden_states, seeded

TIMEOUT_S = 60.0
node_config = partial(zero3_config, gather="auto")
OFFLOADS = pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def config_of(offload: str, folder: Path, lr: float | None = None, **options: Any) -> dict[str, Any]:
    if offload == "nvme":
        config = nvme_config(folder, lr=lr, **options)
        config["zero_optimization"]["stage3_gather"] = "auto"
        return config
    return node_config(offload=offload, lr=lr, **options)


def engine_around(plain: nn.Module, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(plain), config=config)
    engine.eval()
    return engine


def offload_of(engine: deepspeed.DeepSpeedEngine) -> Any:
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


def compare(engine: nn.Module, plain: nn.Module, seed: int, rank: int) -> None:
    """A forward of `Stack` without grad."""
    with torch.no_grad():
        EXACT.check(engine(hidden(seed, rank)), plain(hidden(seed, rank)), f"output for {seed}")


# -- each at its own pace --


@OFFLOADS
@distributed(world_size=(2, 3, 4), timeout_s=TIMEOUT_S)
def test_ranks_that_do_all_different_things(rank: int, offload: str, shared_dir: Path) -> None:
    """One rank does nothing, the others different numbers of forwards, one after the other."""
    plain = stack()
    engine = engine_around(plain, config_of(offload, shared_dir))
    assert offload_of(engine).store is not None
    store = _get_default_store()
    if rank > 1:
        store.wait([f"rank {rank - 1} is done"])
    for seed in range(2 * rank):
        compare(engine, plain, seed, rank)
    store.set(f"rank {rank} is done", "")
    assert_released(engine.module)
    assert statistics_of(engine).rounds == 0
    torch.distributed.barrier()
    engine.destroy()
    torch.distributed.barrier()
    if offload == "nvme":
        assert list((shared_dir / "zero_stage_3").iterdir()) == []


@OFFLOADS
@distributed(world_size=3, timeout_s=TIMEOUT_S, mortal_ranks=(1,))
def test_a_rank_that_is_killed_in_the_middle(rank: int, offload: str, shared_dir: Path) -> None:
    plain = stack()
    engine = engine_around(plain, config_of(offload, shared_dir))
    store = _get_default_store()
    compare(engine, plain, seed=0, rank=rank)
    if rank == 1:
        handle = engine.module.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with torch.no_grad():
            engine(hidden(1, rank))
        handle.remove()
    for seed in range(5):
        compare(engine, plain, seed, rank)
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {2 - rank} is done"])
    engine.destroy()
    if offload == "nvme":
        # The last one removes what is left, the files of the rank that was killed too.
        store.set(f"rank {rank} has left", "")
        store.wait([f"rank {2 - rank} has left"])
        assert list((shared_dir / "zero_stage_3").iterdir()) == []


def first_branch_on_rank_0(model: Any, rank: int, step: int) -> torch.Tensor:
    model.route_to((rank % 4, (rank + 1) % 4) if step else (0, 1))
    output: torch.Tensor = model(hidden_states(seed=10 * step + rank))
    return output


@distributed(world_size=(2, 3, 4), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_ranks_that_use_different_experts(rank: int, training: bool) -> None:
    """C01, C02: each fetches only what it uses, in an engine that has to fetch."""
    plain = seeded(RoutedModel)
    twins = Twins(plain, node_config(lr=LR if training else None))
    for step in range(4):
        with torch.no_grad():
            EXACT.check(
                first_branch_on_rank_0(twins.engine.module, rank, step),
                first_branch_on_rank_0(plain, rank, step),
                f"output {step}",
            )
    assert statistics_of(twins.engine).rounds == (1 if training else 0), "only where the engine was made"
    expert_numel = sum(p.numel() for p in plain.blocks[0].experts[0].parameters())
    others_numel = sum(p.numel() for name, p in plain.named_parameters() if "experts" not in name)
    most = 4 * (others_numel + 2 * len(plain.blocks) * expert_numel)
    used_numel = statistics_of(twins.engine).gathered_numel - statistics_of(twins.engine).discarded_numel
    assert used_numel == (most if training else 0), "in inference everything is a view"


# -- weights that change --


def double(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


def change_by_gathered_parameters(engine: Any, plain: nn.Module, rank: int) -> None:
    parameters = dict(engine.module.named_parameters())
    names = ["blocks.0.up.weight", "blocks.1.down.bias"]
    with deepspeed.zero.GatheredParameters([parameters[name] for name in names], modifier_rank=1):
        if rank == 1:
            for name in names:
                double(parameters[name])


def change_by_state_dict_of_one_rank(engine: Any, plain: nn.Module, rank: int) -> None:
    state = {name: 2 * tensor for name, tensor in plain.state_dict().items()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if rank == 0:
            engine.module.load_state_dict(state)


def change_by_state_dict(engine: Any, plain: nn.Module, rank: int) -> None:
    engine.module.load_state_dict({name: 2 * tensor for name, tensor in plain.state_dict().items()})


def change_by_engine(engine: Any, plain: nn.Module, rank: int) -> None:
    state = {"module": {name: 2 * tensor for name, tensor in plain.state_dict().items()}}
    engine.load_module_state_dict(state, fetch_z3_params=True)


CHANGES: dict[str, tuple[Callable[[Any, nn.Module, int], None], Callable[[str], bool]]] = {
    "GatheredParameters": (
        change_by_gathered_parameters,
        lambda name: name in ("blocks.0.up.weight", "blocks.1.down.bias"),
    ),
    "state dict of one rank": (change_by_state_dict_of_one_rank, lambda name: True),
    "state dict": (change_by_state_dict, lambda name: True),
    "engine": (change_by_engine, lambda name: True),
}


@OFFLOADS
@pytest.mark.parametrize("how", CHANGES)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_weights_that_change_between_forwards(rank: int, offload: str, how: str, shared_dir: Path) -> None:
    """Ranks have made different numbers of forwards when they come to the change."""
    if offload == "nvme" and how == "state dict":
        pytest.skip("parameters on NVMe are partitioned, as in the base: load through the engine")
    plain = stack()
    engine = engine_around(plain, config_of(offload, shared_dir))
    change, is_changed = CHANGES[how]
    for turn in range(2):
        for seed in range(3 * (rank if turn else 1 - rank)):
            compare(engine, plain, seed, rank)
        change(engine, plain, rank)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if is_changed(name):
                    double(parameter)
        compare(engine, plain, seed=turn, rank=rank)
    assert_same_weights(engine.module, plain)
    assert_released(engine.module)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_what_is_written_in_a_gathered_parameter_is_seen_when_all_have_left(rank: int) -> None:
    """Until then each rank has its own copy: nobody can read half of a change."""
    plain = stack()
    engine = engine_around(plain, node_config())
    weight = engine.module.blocks[0].up.weight
    before = weight.data.clone()
    with deepspeed.zero.GatheredParameters(weight):
        weight.data.zero_()
        torch.distributed.barrier()
    EXACT.check(weight.data, before, "without modifier_rank a change is dropped")
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        if rank == 0:
            weight.data.zero_()
        torch.distributed.barrier()
        if rank == 1:
            EXACT.check(weight.data, before, "the other rank's copy")
    assert not weight.data.any()


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_one_gather_in_another(rank: int) -> None:
    """The end of the inner one drops nothing that was written in the outer one."""
    plain = stack()
    engine = engine_around(plain, node_config())
    outer, inner = engine.module.blocks[0].up.weight, engine.module.blocks[1].up.weight
    with deepspeed.zero.GatheredParameters(outer, modifier_rank=0):
        if rank == 0:
            double(outer)
        with deepspeed.zero.GatheredParameters(inner, modifier_rank=1):
            if rank == 1:
                double(inner)
    double(plain.blocks[0].up.weight)
    double(plain.blocks[1].up.weight)
    compare(engine, plain, seed=0, rank=rank)


@pytest.mark.parametrize("reference_first", [False, True], ids=["actor first", "reference first"])
@OFFLOADS
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_parameters_of_two_engines_in_one_gather(
    rank: int, offload: str, reference_first: bool, shared_dir: Path
) -> None:
    """A reference that follows its actor. Each engine has its own way to gather, whichever was made first."""
    plain = stack()
    configs = [node_config(lr=LR), config_of(offload, shared_dir)]
    if reference_first:
        reference, actor = (engine_around(plain, config) for config in reversed(configs))
    else:
        actor, reference = (engine_around(plain, config) for config in configs)
    pairs = list(zip(actor.module.parameters(), reference.module.parameters()))
    with deepspeed.zero.GatheredParameters([p for pair in pairs for p in pair], modifier_rank=0):
        if rank == 0:
            for ours, theirs in pairs:
                double(ours)
                theirs.data.copy_(3 * ours.data)
    for factor, engine in ((2, actor), (3, reference)):
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(factor)
        for seed in range(1 + rank):
            compare(engine, plain, seed, rank)
        assert_released(engine.module)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_a_copy_of_the_model_is_the_rank_s_own(rank: int) -> None:
    """One rank copies it and loads other weights into the copy. No rank has to come, and none sees it."""
    plain = stack()
    engine = engine_around(plain, node_config(stage3_lockstep_timeout_s=5.0))
    if rank == 1:
        copied, doubled = copy.deepcopy(engine.module), {n: 2 * t for n, t in plain.state_dict().items()}
        copied.load_state_dict(doubled)
        changed = stack()
        changed.load_state_dict(doubled)
        compare(copied, changed, seed=0, rank=rank)
    compare(engine, plain, seed=0, rank=rank)


@distributed(world_size=(2, 3), timeout_s=TIMEOUT_S)
def test_a_rank_that_does_not_come_to_a_change_is_named(rank: int, world_size: int) -> None:
    plain = stack()
    engine = engine_around(plain, node_config(stage3_lockstep_timeout_s=1.0))
    store = _get_default_store()
    last = world_size - 1
    if rank == last:
        store.wait([f"rank {other} was told" for other in range(last)])
    else:
        change = deepspeed.zero.GatheredParameters(engine.module.blocks[0].up.weight, modifier_rank=0)
        with pytest.raises(LockstepError, match=f"rank {last} did not come.*"):
            change.__enter__()
        store.set(f"rank {rank} was told", "")
    compare(engine, plain, seed=1, rank=rank)
    assert_released(engine.module)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_a_rank_that_is_getting_on_is_waited_for(rank: int) -> None:
    """However long it takes: the time limit is for ranks that stand still."""
    timeout_s = 0.5
    plain = stack()
    engine = engine_around(plain, node_config(stage3_lockstep_timeout_s=timeout_s))
    if rank == 1:
        began = time.monotonic()
        while time.monotonic() - began < 3 * timeout_s:
            compare(engine, plain, seed=1, rank=rank)
    change_by_gathered_parameters(engine, plain, rank)


@OFFLOADS
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_checkpoint_that_is_loaded(rank: int, offload: str, shared_dir: Path) -> None:
    """Into an engine that trains, where ranks come to it after different numbers of forwards; and what is saved."""
    plain = stack()
    config = config_of(offload, shared_dir / "swap", lr=LR)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    twins = Twins(plain, config)
    twins.train(loss_of_stack(0), "before")
    twins.engine.save_checkpoint(str(shared_dir), tag="one")
    saved = copy.deepcopy(plain.state_dict())
    twins.train(loss_of_stack(1), "after")
    for seed in range(2 * rank):
        twins.compare_forward(partial(output_of_stack, seed), "before the checkpoint is loaded")
    twins.engine.load_checkpoint(str(shared_dir), tag="one")
    plain.load_state_dict(saved)
    twins.compare_forward(partial(output_of_stack, 5), "after it")
    assert twins.engine.save_16bit_model(str(shared_dir / "whole"))
    if rank == 0:
        whole = torch.load(shared_dir / "whole" / "pytorch_model.bin")
        for name, tensor in saved.items():
            torch.testing.assert_close(whole[name], tensor, rtol=1e-4, atol=LR / 100)


# -- generating --


@OFFLOADS
@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("synced", [None, False, True])
def test_generate_while_transformers_knows_of_zero3(
    rank: int, offload: str, synced: bool | None, shared_dir: Path
) -> None:
    """By itself it would have all ranks go on until the last is done. Told to do so, it does."""
    plain = build("llama")
    engine = engine_around(plain, config_of(offload, shared_dir))
    reductions = []
    all_reduce = torch.distributed.all_reduce
    hf_config = HfDeepSpeedConfig(node_config())
    torch.distributed.all_reduce = lambda *args, **kwargs: (reductions.append(1), all_reduce(*args, **kwargs))[1]
    try:
        options = {} if synced is None else {"synced_gpus": synced}
        for prompt in range(2 if synced else 1 + 2 * rank):
            ids = token_ids(seed=prompt, batch=1)
            new = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
            expected = plain.generate(ids, synced_gpus=False, **new)
            assert engine.module.generate(ids, **options, **new).tolist() == expected.tolist()
    finally:
        torch.distributed.all_reduce = all_reduce
        del hf_config
    assert bool(reductions) is bool(synced)
    engine.destroy()
    assert "generate" not in engine.module.__dict__
    assert "load_state_dict" not in engine.module.__dict__


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_a_generate_that_the_user_has_put_on_the_model(rank: int) -> None:
    model = build("llama")
    model.generate = lambda *args, **kwargs: "the user's"
    engine, *_ = deepspeed.initialize(model=model, config=node_config())
    assert engine.module.generate() == "the user's"
    engine.destroy()
    assert model.generate() == "the user's"


def output_of_stack(seed: int, model: Any, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden(seed, rank))
    return output


def loss_of_stack(seed: int) -> Any:
    def loss_of(model: Any, rank: int) -> torch.Tensor:
        loss: torch.Tensor = model(hidden(seed, rank).requires_grad_()).square().mean()
        return loss

    return loss_of


@OFFLOADS
@distributed(world_size=(2, 3), timeout_s=TIMEOUT_S)
def test_actor_that_makes_uneven_forwards_between_its_steps(rank: int, offload: str, shared_dir: Path) -> None:
    """RLHF: between steps one rank makes no rollout, another several; all train on. Weights are never of two steps."""
    plain = stack()
    twins = Twins(plain, config_of(offload, shared_dir, lr=LR))
    for iteration in range(4):
        for seed in range((rank * 2 + iteration) % 4):
            twins.compare_forward(partial(output_of_stack, seed), f"rollout {seed} of iteration {iteration}")
        twins.train(loss_of_stack(iteration), f"iteration {iteration}")
    twins.compare_weights()
    assert_released(twins.engine.module)


@pytest.mark.parametrize("threshold", [2000, 10**9], ids=["some", "all"])
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_actor_with_persistent_parameters(rank: int, threshold: int) -> None:
    """A rank that has read them since the last step does not need them in its next pass with grad; the other does."""
    twins = Twins(stack(), node_config(lr=LR, stage3_param_persistence_threshold=threshold))
    for iteration in range(4):
        for seed in range((rank + iteration) % 2):
            twins.compare_forward(partial(output_of_stack, seed), f"rollout {seed} of iteration {iteration}")
        twins.train(loss_of_stack(iteration), f"iteration {iteration}")
    twins.compare_weights()


@distributed(world_size=(2, 3, 4), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_actor_that_generates_uneven_texts_between_its_steps(rank: int, world_size: int, offload: str) -> None:
    plain = build("llama")
    twins = Twins(plain, node_config(offload=offload, lr=LR))
    for iteration in range(4):
        plain.eval()
        twins.engine.eval()
        for prompt in range((rank * 2 + iteration) % 4):
            ids = token_ids(seed=10 * iteration + prompt, batch=1)
            new = {"max_new_tokens": 2 + (rank + prompt) % 3, "do_sample": False}
            assert twins.engine.module.generate(ids, **new).tolist() == plain.generate(ids, **new).tolist()
        plain.train()
        twins.engine.train()
        twins.train(lambda model, of: model(token_ids(seed=of), labels=token_ids(seed=of)).loss, f"step {iteration}")
    twins.compare_weights()


# -- which way is taken --


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_collective_is_obeyed(rank: int) -> None:
    plain = stack()
    engine = engine_around(plain, node_config(gather="collective"))
    assert offload_of(engine).store is None
    compare(engine, plain, seed=0, rank=rank)
    assert statistics_of(engine).gathers > 0


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("mode", ["auto", "node"])
def test_ranks_that_cannot_read_each_other(rank: int, mode: str) -> None:
    """As if they were on two machines: auto gathers together, node is refused."""
    plain = stack()
    config = node_config(gather=mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_mode, "_machine", lambda: f"machine {rank}")
        if mode == "node":
            with pytest.raises(ValueError, match="stage3_gather: node is not possible.*on several machines"):
                engine_around(plain, config)
            return
        engine = engine_around(plain, config)
    assert offload_of(engine).store is None
    compare(engine, plain, seed=0, rank=rank)


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_one_rank_reads_itself(rank: int) -> None:
    plain = stack()
    engine = engine_around(plain, node_config(gather="node"))
    compare(engine, plain, seed=0, rank=rank)


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="stage3_gather(.|\n)*'auto', 'collective' or 'node'"):
        DeepSpeedZeroConfig(stage=3, stage3_gather="nodes")


# -- how much of it there is --


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_the_model_is_in_memory_once(rank: int) -> None:
    """Over both ranks, counting what they share once (PSS)."""
    config = node_config()
    with deepspeed.zero.Init(config_dict_or_path=config, mem_efficient_linear=False):
        model = Stack(layers=16)
    numel = sum(p.ds_numel for p in model.parameters())
    gc.collect()
    before = psutil.Process().memory_full_info().pss
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    with torch.no_grad():
        engine(hidden(0, rank))
    torch.distributed.barrier()
    grown = torch.tensor([float(psutil.Process().memory_full_info().pss - before)])
    torch.distributed.all_reduce(grown)
    # Each rank had its half before.
    assert float(grown) < 0.5 * 4 * numel, "another copy would be as much as the model"


@distributed(world_size=2, timeout_s=2 * TIMEOUT_S)
def test_fifty_engines_one_after_the_other(rank: int) -> None:
    plain = stack()

    def once(seed: int) -> None:
        engine = engine_around(plain, node_config())
        compare(engine, plain, seed, rank)
        torch.distributed.barrier()
        engine.destroy()

    def state() -> tuple[int, int, int]:
        gc.collect()
        process = psutil.Process()
        segments = [m for m in process.memory_maps(grouped=False) if "deepspeed-zero3" in m.path]
        return process.memory_info().rss, process.num_fds(), len(segments)

    for seed in range(20):
        once(seed)
    rss_before, fds_before, _ = state()
    for seed in range(30):
        once(seed)
    rss, fds, segments = state()
    model_bytes = 4 * sum(p.numel() for p in plain.parameters())
    assert segments == 0
    # One model more or less is what the allocator keeps; thirty would be a leak.
    assert rss - rss_before < 5 * model_bytes
    assert fds - fds_before < 10
