"""How a model comes to be spread over the ranks: by the base's kernels, by a plan of ours, or by the base's AutoTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.replace_policy import replace_policies
from deepspeed.module_inject.tensor_parallel.checkpoint import checkpoint_files
from deepspeed.module_inject.tensor_parallel.collectives import TensorParallelGroup
from deepspeed.module_inject.tensor_parallel.loading import is_on_meta
from deepspeed.moe.utils import has_moe_layers
from torch import nn

_STARTED_BY = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def has_kernel_policy(model: Any) -> bool:
    """Whether the base has an injection policy for a layer of this model. What is no module (a pipeline of diffusers)
    is for the base to decide."""
    if not isinstance(model, nn.Module):
        return True
    classes: set[type] = set()
    for policy in replace_policies:
        policy(None)  # looks its layer classes up
        of_policy = policy._orig_layer_class
        classes.update(of_policy if isinstance(of_policy, list) else [of_policy])
    return any(type(module) in classes for module in model.modules())


def has_kernels() -> bool:
    """Whether this machine can run the base's inference kernels."""
    builder = get_accelerator().create_op_builder("InferenceBuilder")
    if builder is None or type(builder).__name__ == "NotImplementedBuilder":
        return False
    return bool(builder.is_compatible(verbose=False))


def needs_base(model: nn.Module) -> bool:
    """Models that a plan cannot divide: whose heads take part in something outside the attention's own module (biases
    by position), whose experts are spread over the ranks already, or whose parameters are.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "alibi", False):
        return True
    return has_moe_layers(model)[0] or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def weights_of(model: Any, config: Any) -> list[Path] | None:
    """The safetensors files from which a module on the meta device is loaded, or None if it has its weights, or if the
    base loads it (with kernels, or a checkpoint that is described otherwise).

    ``checkpoint`` is a folder, a safetensors file, or a description ``{"checkpoints": [files], ...}`` or its path.
    """
    if config.replace_with_kernel_inject or not is_on_meta(model):
        return None
    checkpoint = config.checkpoint
    if checkpoint is None:
        raise ValueError(
            "the model is on the meta device: say where its weights are, init_inference(model, checkpoint=FOLDER)"
        )
    if isinstance(checkpoint, str) and not checkpoint.endswith(".json"):
        return checkpoint_files(Path(checkpoint))
    if isinstance(checkpoint, str):
        checkpoint = json.loads(Path(checkpoint).read_text(encoding="utf-8"))
    names = checkpoint.get("checkpoints")
    if not isinstance(names, list) or not all(str(name).endswith(".safetensors") for name in names):
        return None
    base_dir = Path(config.base_dir or checkpoint.get("base_dir") or ".")
    return [base_dir / name for name in names]


def folder_of(model: str | Path) -> Path:
    """The folder itself, or the local copy of a model on a hub, which is fetched if it is not there."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json"]))


def tensor_parallel_size(config: Any) -> int:
    mpu = config.tensor_parallel.mpu
    if mpu is not None:
        return int(dist.get_world_size(group=mpu.get_model_parallel_group()))
    return int(config.tensor_parallel.tp_size)


def join_group(config: Any, ranks: int) -> TensorParallelGroup:
    """The ``ranks`` that hold this rank's model: consecutive ones. A collective over the world.

    Raises ValueError if so many ranks were not started, or the world cannot be divided into such groups.
    """
    if config.tensor_parallel.mpu is not None:
        return TensorParallelGroup(config.tensor_parallel.mpu.get_model_parallel_group())
    _initialize(ranks)
    if config.tensor_parallel.tp_group is not None:
        return TensorParallelGroup(config.tensor_parallel.tp_group)
    world = dist.get_world_size()
    if world % ranks:
        raise ValueError(
            f"tp_size={ranks}: expected a number of ranks that is a multiple of it, got {world}."
            f" Start {ranks} ranks: deepspeed --num_gpus {ranks} SCRIPT, or torchrun --nproc-per-node {ranks} SCRIPT"
        )
    if world == ranks:
        return TensorParallelGroup()
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
    return TensorParallelGroup(groups[dist.get_rank() // ranks])


def _initialize(ranks: int) -> None:
    if not torch.distributed.is_initialized() and not any(name in os.environ for name in _STARTED_BY):
        raise ValueError(
            f"tp_size={ranks}, but this process was started by itself: none of {', '.join(_STARTED_BY)} is set."
            f" Start {ranks} ranks: deepspeed --num_gpus {ranks} SCRIPT, or torchrun --nproc-per-node {ranks} SCRIPT"
        )
    # torchrun does not set what the `deepspeed` launcher sets, and what the sum over shared memory looks at.
    if "LOCAL_WORLD_SIZE" in os.environ:
        os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    accelerator = get_accelerator()
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ:
        # Processes that were started by hand: without it the base would ask MPI who they are.
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % max(accelerator.device_count(), 1))
    if not dist.is_initialized():
        dist.init_distributed()
    accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
