"""Parameters on NVMe: any size, any number, any buffers, in inference and training, and when a disk fails.

Partitions below 1 MiB stay in memory, so the matrices here are larger than that on two ranks as well.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.swap_tensor.host_cache import HostCache
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comparisons import Tolerance, assert_released
from tests.distributed.twins import LR, Twins, statistics_of
from tests.harness import distributed
from tests.models import zero3_config

WIDTH = 1280
MATRIX_NUMEL = WIDTH * WIDTH
LAYERS = 4
TIMEOUT_S = 90.0
STEPS = 5
CLOSE = Tolerance(rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks; with ``reentrant`` set, recomputed in the backward."""

    def __init__(self, layers: int = 2, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def hidden(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))


def output_of(seed: int, model: Callable[..., Any], rank: int) -> torch.Tensor:
    output: torch.Tensor = model(hidden(seed, rank))
    return output


def loss_of(seed: int, model: Callable[..., Any], rank: int) -> torch.Tensor:
    x = hidden(seed, rank).requires_grad_()
    loss: torch.Tensor = model(x).square().mean()
    return loss


def nvme_config(path: Path, *, lr: float | None = None, optimizer: str = "none", **options: Any) -> dict[str, Any]:
    """Parameters on NVMe, and the optimizer's state on ``optimizer``."""
    config = zero3_config(
        lr=lr,
        offload_param={"device": "nvme", "nvme_path": str(path), "pin_memory": False, "max_in_cpu": 0, **options},
    )
    if optimizer != "none":
        offload = {"device": optimizer, "pin_memory": False}
        if optimizer == "nvme":
            offload |= {"nvme_path": str(path), "buffer_count": 6}
        config["zero_optimization"]["offload_optimizer"] = offload
    return config


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def swap_files(path: Path, rank: int = 0) -> list[Path]:
    files = sorted(path.rglob(f"params-rank{rank}-*/*.swp"))
    assert files, f"expected swap files of rank {rank} below {path}, so that the test is about NVMe"
    return files


# -- inference --


@distributed(world_size=(1, 2, 3), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forwards(shared_dir: Path, dtype: torch.dtype) -> None:
    config = nvme_config(shared_dir)
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}

    def output(seed: int, model: Callable[..., Any], rank: int) -> torch.Tensor:
        result: torch.Tensor = model(hidden(seed, rank).to(dtype))
        return result

    twins = Twins(seeded(Stack).to(dtype).eval(), config)
    swap_files(shared_dir)
    for seed in range(4):
        twins.compare_forward(partial(output, seed), f"forward {seed}")
        assert_released(twins.engine.module)
    assert statistics_of(twins.engine).live_numel == 0


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("prefetch_numel", [0, MATRIX_NUMEL, 10 * MATRIX_NUMEL])
def test_reading_ahead_keeps_to_its_budgets(shared_dir: Path, prefetch_numel: int) -> None:
    config = nvme_config(shared_dir)
    live_numel = 2 * MATRIX_NUMEL + 4 * WIDTH
    config["zero_optimization"] |= {
        "stage3_prefetch_bucket_size": prefetch_numel,
        "stage3_max_live_parameters": live_numel,
    }
    twins = Twins(seeded(lambda: Stack(layers=LAYERS)).eval(), config)
    for seed in range(4):
        twins.compare_forward(partial(output_of, seed), f"forward {seed}")
    assert statistics_of(twins.engine).peak_live_numel <= live_numel


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_values_that_were_kept_when_their_parameter_was_released_stay_as_they_are(shared_dir: Path) -> None:
    """Parameters are read into memory of those that were released, but not into what somebody still looks at."""
    twins = Twins(seeded(lambda: Stack(layers=LAYERS)).eval(), nvme_config(shared_dir))
    weight = twins.engine.module.blocks[0].up.weight
    kept: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        kept.append(weight.data[7:9].t())

    hook = twins.engine.module.blocks[0].up.register_forward_pre_hook(keep)
    for seed in range(3):
        twins.compare_forward(partial(output_of, seed), f"forward {seed}")
    hook.remove()
    expected = twins.plain.blocks[0].up.weight.detach()[7:9].t()
    assert len(kept) == 3
    for values in kept:
        assert torch.equal(values, expected)
    assert weight.nvme_swapper.stock.reused > 0


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
def test_weights_changed_by_gathered_parameters_are_read_next(shared_dir: Path, rank: int) -> None:
    twins = Twins(seeded(Stack).eval(), nvme_config(shared_dir))
    weight, plain = twins.engine.module.blocks[0].up.weight, twins.plain.blocks[0].up.weight
    for round_number in range(3):
        twins.compare_forward(partial(output_of, round_number), f"before change {round_number}")
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            if rank == 0:
                weight.mul_(1.5)
        with torch.no_grad():
            plain.mul_(1.5)
    twins.compare_forward(partial(output_of, 9), "after all changes")
    twins.compare_weights()


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_destroyed_engine_leaves_no_files_and_others_theirs(shared_dir: Path) -> None:
    first, second = (
        Twins(seeded(Stack, seed=seed).to(dtype).eval(), nvme_config(shared_dir))
        for seed, dtype in ((1, torch.float32), (2, torch.float32))
    )
    first.compare_forward(partial(output_of, 1), "the first")
    second.compare_forward(partial(output_of, 1), "the second")
    first.engine.destroy()
    second.compare_forward(partial(output_of, 2), "the second, without the first")
    second.engine.destroy()
    assert not [path for path in shared_dir.rglob("*") if path.is_file()]


def cache_of(twins: Twins) -> HostCache:
    cache: HostCache = next(twins.engine.module.parameters()).nvme_swapper.cache
    return cache


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_max_in_cpu_saves_its_share_of_the_reads(shared_dir: Path, world_size: int, share: float) -> None:
    """Half of the matrices in host memory: half of the reads go to the disk, and not all, as in a cache that keeps what
    was used last."""
    matrices, rounds = 2 * LAYERS, 4
    kept = int(share * matrices)
    config = nvme_config(shared_dir, max_in_cpu=kept * MATRIX_NUMEL // world_size)
    twins = Twins(seeded(lambda: Stack(layers=LAYERS)).eval(), config)
    cache = cache_of(twins)
    for seed in range(3):
        twins.compare_forward(partial(output_of, seed), f"forward {seed}")
    cache.hits = cache.misses = 0
    for seed in range(rounds):
        twins.compare_forward(partial(output_of, 3 + seed), f"forward {3 + seed}")
    # Where not all fit, the best that any cache can do leaves out one place for what passes through.
    assert rounds * (kept if kept in (0, matrices) else kept - 1) <= cache.hits <= rounds * kept
    assert cache.hits + cache.misses == rounds * matrices
    assert cache.numel <= cache.limit_numel


# -- training --


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
def test_training_with_a_host_cache_reads_no_old_weights(shared_dir: Path, world_size: int) -> None:
    """As much in host memory as a half of the model, of which the optimizer keeps nothing for good: it has one
    sub-group, which does not fit."""
    config = nvme_config(shared_dir, lr=LR, optimizer="nvme", max_in_cpu=2 * MATRIX_NUMEL // world_size)
    twins = Twins(seeded(Stack), config)
    cache = cache_of(twins)
    for step in range(STEPS):
        twins.train(partial(loss_of, step), f"step {step}", CLOSE)
    twins.compare_weights()
    assert cache.hits + cache.misses > 0
    assert cache.numel <= cache.limit_numel


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
def test_training(shared_dir: Path, optimizer: str) -> None:
    twins = Twins(seeded(Stack), nvme_config(shared_dir, lr=LR, optimizer=optimizer))
    swap_files(shared_dir)
    for step in range(STEPS):
        twins.train(partial(loss_of, step), f"step {step}", CLOSE)
        assert_released(twins.engine.module)
    twins.compare_weights()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("reentrant", [True, False])
def test_training_with_gradient_checkpointing(shared_dir: Path, reentrant: bool) -> None:
    twins = Twins(seeded(lambda: Stack(reentrant=reentrant)), nvme_config(shared_dir, lr=LR, optimizer="cpu"))
    for step in range(3):
        twins.train(partial(loss_of, step), f"step {step}", CLOSE)
    twins.compare_weights()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_training_when_matrices_on_nvme_are_persistent(shared_dir: Path, optimizer: str) -> None:
    config = nvme_config(shared_dir, lr=LR, optimizer=optimizer)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 2 * MATRIX_NUMEL
    twins = Twins(seeded(Stack), config)
    swap_files(shared_dir)
    for step in range(3):
        twins.train(partial(loss_of, step), f"step {step}", CLOSE)
    twins.compare_weights()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(
    ("parameters", "optimizer", "options"),
    [
        pytest.param("nvme", "cpu", {}, marks=pytest.mark.slow),  # test_checkpoints.py has it too.
        ("nvme", "nvme", {}),
        pytest.param("nvme", "nvme", {"sub_group_size": MATRIX_NUMEL}, marks=pytest.mark.slow),
        ("nvme", "nvme", {"sub_group_size": MATRIX_NUMEL, "stage3_param_persistence_threshold": 2 * WIDTH}),
        ("cpu", "nvme", {"sub_group_size": MATRIX_NUMEL}),
        ("none", "nvme", {}),
    ],
    ids=["cpu", "nvme", "sub-groups", "persistent biases", "parameters on the host", "parameters not offloaded"],
)
@pytest.mark.parametrize(
    "by_another", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["another engine", "the same engine"]
)
def test_checkpoint(
    shared_dir: Path, parameters: str, optimizer: str, options: dict[str, Any], by_another: bool
) -> None:
    """Saved after two steps and loaded: what follows is as if nothing had happened in between.

    With sub-groups of one matrix, the last one is a bias alone, which is too small for a file.
    """

    def config(path: Path, lr: float) -> dict[str, Any]:
        config = nvme_config(path, lr=lr, optimizer=optimizer)
        config["zero_optimization"] |= options
        if parameters != "nvme":
            config["zero_optimization"]["offload_param"] = {"device": parameters, "pin_memory": False}
        return config

    twins = Twins(seeded(Stack), config(shared_dir / "first", LR))
    for step in range(2):
        twins.train(partial(loss_of, step), f"step {step}", CLOSE)
    twins.engine.save_checkpoint(str(shared_dir / "checkpoint"))
    if by_another:
        # With another learning rate: that of the checkpoint counts.
        model = seeded(Stack, seed=5)
        twins.engine, *_ = deepspeed.initialize(model=model, config=config(shared_dir / "second", 7 * LR))
    else:
        loss = loss_of(9, twins.engine, torch.distributed.get_rank())
        twins.engine.backward(loss)
        twins.engine.step()
    twins.engine.load_checkpoint(str(shared_dir / "checkpoint"))
    twins.compare_weights()
    for step in range(2, 5):
        twins.train(partial(loss_of, step), f"step {step}, after loading", CLOSE)
        twins.compare_weights()


def optimizer_files(checkpoint: Path) -> list[Path]:
    files = sorted(checkpoint.rglob("offloaded_tensors/*/*.swp"))
    assert files
    return files


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_checkpoint_whose_files_are_named_by_other_numbers(shared_dir: Path) -> None:
    """The base names the files of a sub-group by the numbers of its first and last parameter."""
    config = nvme_config(shared_dir, lr=LR, optimizer="nvme")
    config["zero_optimization"]["sub_group_size"] = MATRIX_NUMEL
    twins = Twins(seeded(Stack), config)
    twins.train(partial(loss_of, 0), "step 0", CLOSE)
    twins.engine.save_checkpoint(str(shared_dir / "checkpoint"))
    for file in optimizer_files(shared_dir / "checkpoint"):
        number = int(file.name.partition(".")[0].rpartition("_")[2])
        file.rename(file.with_name(file.name.replace(f"{number}_{number}", f"{8 + number}_{9 + number}")))
    twins.engine, *_ = deepspeed.initialize(model=seeded(Stack, seed=5), config=config)
    twins.engine.load_checkpoint(str(shared_dir / "checkpoint"))
    for step in range(1, 3):
        twins.compare_weights()
        twins.train(partial(loss_of, step), f"step {step}, after loading", CLOSE)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}], ids=str)
def test_weights_alone_of_a_checkpoint_with_the_optimizer_on_nvme(options: dict[str, bool], shared_dir: Path) -> None:
    config = nvme_config(shared_dir, lr=LR, optimizer="nvme")
    twins = Twins(seeded(Stack), config)
    for step in range(2):
        twins.train(partial(loss_of, step), f"step {step}", CLOSE)
    twins.engine.save_checkpoint(str(shared_dir / "checkpoint"))
    plain = twins.plain
    twins = Twins(seeded(Stack, seed=5), config)
    twins.engine.load_checkpoint(str(shared_dir / "checkpoint"), **options)
    twins.plain.load_state_dict(plain.state_dict())
    twins.compare_weights()
    twins.train(partial(loss_of, 2), "the first step of a new optimizer", CLOSE)
    twins.compare_weights()


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_checkpoint_that_replaces_one_of_the_same_tag(shared_dir: Path) -> None:
    config = nvme_config(shared_dir, lr=LR, optimizer="nvme")
    twins = Twins(seeded(Stack), config)
    for step in range(2):
        twins.train(partial(loss_of, step), f"step {step}", CLOSE)
        twins.engine.save_checkpoint(str(shared_dir / "checkpoint"), tag="last")
    twins.engine, *_ = deepspeed.initialize(model=seeded(Stack, seed=5), config=config)
    twins.engine.load_checkpoint(str(shared_dir / "checkpoint"))
    twins.compare_weights()
    twins.train(partial(loss_of, 2), "step 2, after loading", CLOSE)
    twins.compare_weights()


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_checkpoint_of_other_sub_groups_is_refused(shared_dir: Path) -> None:
    config = nvme_config(shared_dir, lr=LR, optimizer="nvme")
    twins = Twins(seeded(Stack), config)
    twins.engine.save_checkpoint(str(shared_dir / "checkpoint"))
    config["zero_optimization"]["sub_group_size"] = MATRIX_NUMEL
    twins.engine, *_ = deepspeed.initialize(model=seeded(Stack, seed=5), config=config)
    with pytest.raises((RuntimeError, OSError), match="sub_group_size|end of file"):
        twins.engine.load_checkpoint(str(shared_dir / "checkpoint"))


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
def test_two_optimizers_on_one_path(shared_dir: Path, rank: int) -> None:
    """They train by turns; the files of the one that is destroyed go, and only they."""
    first, second = (
        Twins(seeded(Stack, seed=seed), nvme_config(shared_dir, lr=LR, optimizer="nvme")) for seed in (1, 2)
    )
    for step in range(2):
        first.train(partial(loss_of, step), f"first, step {step}", CLOSE)
        second.train(partial(loss_of, 10 + step), f"second, step {step}", CLOSE)
    first.compare_weights()
    folders = [len(list(shared_dir.rglob(f"{name}-rank{rank}-*"))) for name in ("params", "optimizer")]
    first.engine.destroy()
    left = [len(list(shared_dir.rglob(f"{name}-rank{rank}-*"))) for name in ("params", "optimizer")]
    assert [before - after for before, after in zip(folders, left)] == [2, 2], "a folder and its lock"
    second.train(partial(loss_of, 12), "second, step 2", CLOSE)
    second.compare_weights()
    second.engine.destroy()
    torch.distributed.barrier()
    assert not [path for path in shared_dir.rglob("*") if path.is_file()]


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
def test_training_with_gradient_accumulation(shared_dir: Path) -> None:
    config = nvme_config(shared_dir, lr=LR, optimizer="cpu")
    config["gradient_accumulation_steps"] = 2
    twins = Twins(seeded(Stack), config)
    for step in range(3):
        twins.train_on([partial(loss_of, 2 * step), partial(loss_of, 2 * step + 1)], f"step {step}", CLOSE)
    twins.compare_weights()


# -- when a disk fails --


@contextlib.contextmanager
def truncated(file: Path) -> Iterator[None]:
    """The file is shorter for a while, and then as it was: with its content and its time of change."""
    content, status = file.read_bytes(), file.stat()
    os.truncate(file, len(content) // 2)
    yield
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("traced", [0, 3], ids=["first forward", "after 3 forwards"])
def test_file_of_one_rank_that_cannot_be_read(shared_dir: Path, rank: int, world_size: int, traced: int) -> None:
    """Its rank raises an OSError, the others an error that names it; and the next forward is right."""
    twins = Twins(seeded(Stack).eval(), nvme_config(shared_dir))
    for seed in range(traced):
        twins.compare_forward(partial(output_of, seed), f"forward {seed}")
    odd = world_size - 1
    torch.distributed.barrier()
    with contextlib.ExitStack() as stack:
        if rank == odd:
            for file in swap_files(shared_dir, odd)[-2:]:
                stack.enter_context(truncated(file))
        torch.distributed.barrier()
        expected = (OSError, r"\.swp.*offset") if rank == odd else (RuntimeError, rf"ranks \[{odd}\].*could not read")
        with pytest.raises(expected[0], match=expected[1]), torch.no_grad():
            twins.engine(hidden(7, rank))
        torch.distributed.barrier()
    torch.distributed.barrier()
    for seed in range(3):
        twins.compare_forward(partial(output_of, 10 + seed), f"forward {seed} after the error")
        assert_released(twins.engine.module)


@contextlib.contextmanager
def small_disk(path: Path, size_mib: int) -> Iterator[None]:
    """A file system of its own at ``path``. Skips where this user may not mount one."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@distributed(world_size=1, timeout_s=TIMEOUT_S)
def test_full_disk(shared_dir: Path) -> None:
    """An error at the write, which names file, wanted and free; the process lives, and goes on."""
    with small_disk(shared_dir / "disk", size_mib=16):
        config = nvme_config(shared_dir / "disk")
        with pytest.raises(OSError, match=r"\.swp: could not write .* bytes are free there.*No space left"):
            Twins(seeded(lambda: Stack(layers=LAYERS)), config)
        gc.collect()
        assert not list((shared_dir / "disk").rglob("*.swp"))
        twins = Twins(seeded(lambda: Stack(layers=1)).eval(), config)
        twins.compare_forward(partial(output_of, 1), "the next engine")
        twins.engine.destroy()


# -- configurations that cannot work --


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"nvme_path has to name a folder"),
        ({"nvme_path": __file__}, r"nvme_path has to name a folder, but .* is a file"),
        ({"nvme_path": "/tmp", "buffer_count": 0}, r"buffer_count has to be at least 1, got 0"),
        ({"nvme_path": "/tmp", "buffer_count": -1}, r"buffer_count"),
    ],
    ids=["no path", "path is a file", "no buffers", "negative"],
)
def test_refused_before_the_model_is_touched(section: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedZeroConfig(stage=3, **{section: {"device": "nvme", **options}})


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_keys_for_nvme_do_not_matter_elsewhere(section: str) -> None:
    config = DeepSpeedZeroConfig(stage=3, **{section: {"device": "cpu", "buffer_count": 0}})
    assert getattr(config, section).device == "cpu"
