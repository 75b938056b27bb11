"""The base's inference engine over a model that is divided among the ranks by a plan (docs/tensor_parallel.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig, RankInputs
from deepspeed.inference.rank_inputs import check_inputs, take_inputs_of_first_rank
from deepspeed.inference.ways import (
    folder_of,
    has_kernel_policy,
    has_kernels,
    join_group,
    needs_base,
    tensor_parallel_size,
    weights_of,
)
from deepspeed.model_implementations.transformers.ds_transformer import DeepSpeedTransformerInference
from deepspeed.module_inject.tensor_parallel.checkpoint import checkpoint_files
from deepspeed.module_inject.tensor_parallel.collectives import TensorParallelGroup
from deepspeed.module_inject.tensor_parallel.layout import Plan, plan
from deepspeed.module_inject.tensor_parallel.loading import Loaded, is_on_meta, load_slices, model_on_meta
from deepspeed.module_inject.tensor_parallel.report import LEAST_SHARE, refusal, summary
from deepspeed.module_inject.tensor_parallel.roles import declared_roles, planned_roles
from deepspeed.module_inject.tensor_parallel.shard import shard_in_memory
from deepspeed.module_inject.tensor_parallel.wiring import wire
from deepspeed.utils import logger
from deepspeed.utils.logging import log_dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import _base_engine
from ._base_engine import *  # noqa: F401,F403


class InferenceEngine(_base_engine.InferenceEngine):
    """See the base's. ``plan`` says who holds what, if the model was divided by one, and ``loaded`` what was read."""

    def __init__(self, model: Any, config: DeepSpeedInferenceConfig) -> None:
        folder = folder_of(model) if isinstance(model, (str, Path)) else None
        if folder is not None:
            model = model_on_meta(folder, _float_type(config))
        config = _without_missing_kernels(model, config, has_weights=folder is None)
        files = weights_of(model, config) if folder is None else checkpoint_files(folder)
        ranks = tensor_parallel_size(config)
        layout = _plan(model, config, ranks, loads=files is not None)
        if layout is None:
            before = _matrix_numels(model) if ranks > 1 and not config.replace_with_kernel_inject else {}
            super().__init__(model, config)
            self._forget_plan()
            _require_divided(self.module, before, ranks, self.mp_group)
            return
        if ranks > 1 and config.enable_cuda_graph:
            raise ValueError(
                "enable_cuda_graph=True: graphs cannot hold what ranks exchange; use tp_size=1 or no graphs"
            )
        group = join_group(config, ranks) if ranks > 1 else None
        rank = group.rank if group else 0
        loaded = None
        if files is None:
            shard_in_memory(model, layout, rank, _float_type(config))
        else:
            loaded = load_slices(model, layout, rank, files, _float_type(config), _device(config))
        super().__init__(model, _of_one_rank(config))
        self._forget_plan()
        self.plan, self.loaded, self._config = layout, loaded, config
        if group is not None:
            self._join(layout, group)

    def _forget_plan(self) -> None:
        self.plan: Plan | None = None
        self.loaded: Loaded | None = None
        self._group: TensorParallelGroup | None = None
        self._hooks: list[RemovableHandle] = []

    def _join(self, layout: Plan, group: TensorParallelGroup) -> None:
        """From now on the module computes together with those of the other ranks."""
        self._group = group
        self.mp_group, self.mpu = group.handle, self._config.tensor_parallel.mpu
        self._hooks = wire(self.module, layout, group)
        if self._config.tensor_parallel.inputs != RankInputs.trust:
            self._hooks.append(check_inputs(self.module, group))
        _share_random_state(group)
        element_bytes = next((parameter.element_size() for parameter in self.module.parameters()), 0)
        log_dist(summary(layout, element_bytes, self.loaded), ranks=[group.global_ranks[0]])
        for note in layout.notes:
            log_dist(f"Tensor parallelism: {note}", ranks=[group.global_ranks[0]])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; with ``inputs: broadcast``, of what rank 0 was given."""
        inputs, kwargs = self._agreed_inputs(inputs, kwargs)
        return super().forward(*inputs, **kwargs)

    def _generate(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._broadcasts():
            _share_random_state(self._group)
        inputs, kwargs = self._agreed_inputs(inputs, kwargs)
        return super()._generate(*inputs, **kwargs)

    def _broadcasts(self) -> bool:
        return self._group is not None and self._config.tensor_parallel.inputs == RankInputs.broadcast

    def _agreed_inputs(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._broadcasts():
            return inputs, kwargs
        device = torch.device(get_accelerator().current_device_name())
        return take_inputs_of_first_rank(inputs, kwargs, self._group, device)

    def destroy(self) -> None:
        """Take the hooks off the model. Its parameters stay divided."""
        for handle in getattr(self, "_hooks", []):
            handle.remove()
        if DeepSpeedTransformerInference.workspace is not None:
            super().destroy()


def _without_missing_kernels(
    model: Any, config: DeepSpeedInferenceConfig, has_weights: bool
) -> DeepSpeedInferenceConfig:
    """The configuration without kernel injection where that cannot be done, which is said."""
    if not config.replace_with_kernel_inject:
        return config
    if not has_kernel_policy(model):
        why = f"there is no policy for {type(model).__name__}"
    elif not has_kernels():
        why = "this machine cannot run the kernels"
    elif not has_weights:
        why = "a model that is given as a folder is loaded slice by slice, which the kernels' own loading cannot"
    else:
        return config
    logger.warning(
        "replace_with_kernel_inject=True, but %s: no kernels are injected, and the model is divided by automatic tensor"
        " parallelism (tp_size=%d)",
        why,
        tensor_parallel_size(config),
    )
    return config.model_copy(update={"replace_with_kernel_inject": False})


def _plan(model: Any, config: DeepSpeedInferenceConfig, ranks: int, loads: bool) -> Plan | None:
    """How this model is to be divided, or None if that is left to the base.

    The base cannot load in slices: a model that is to be loaded (``loads``) and cannot be divided is refused here.
    """
    if not loads and (ranks == 1 or config.replace_with_kernel_inject or config.dtype == torch.int8):
        return None
    if not isinstance(model, nn.Module) or (not loads and (needs_base(model) or is_on_meta(model))):
        return None
    roles = {**planned_roles(model), **declared_roles(model, config.injection_policy or {})}
    layout = plan(model, ranks, config.tensor_parallel.tp_grain_size, roles)
    divided = layout.split_share >= LEAST_SHARE
    if ranks == 1 or (divided and not needs_base(model)):
        return layout
    if loads and needs_base(model):
        raise ValueError(
            f"{type(model).__name__} is divided by AutoTP, which cannot load in slices: load the model yourself"
            " (from_pretrained) and give it to init_inference"
        )
    # With too few heads the base would leave ranks with nothing of an attention.
    if loads or layout.indivisible:
        raise ValueError(refusal(layout.split_share, ranks, list(layout.unsplit.items())))
    return None


def _float_type(config: DeepSpeedInferenceConfig) -> torch.dtype | None:
    """What floating-point parameters become; None where the base quantizes them."""
    return None if config.dtype == torch.int8 else config.dtype


def _device(config: DeepSpeedInferenceConfig) -> torch.device:
    """Where parameters are put as they are loaded."""
    return torch.device("cpu" if config.keep_module_on_host else get_accelerator().current_device_name())


def _of_one_rank(config: DeepSpeedInferenceConfig) -> DeepSpeedInferenceConfig:
    """For the base's constructor: the model is divided already, and is only cast and moved."""
    alone = config.tensor_parallel.model_copy(update={"tp_size": 1, "mpu": None, "tp_group": None})
    return config.model_copy(update={"tensor_parallel": alone, "injection_policy": None, "checkpoint": None})


def _share_random_state(group: TensorParallelGroup | None) -> None:
    """All ranks draw what rank 0 draws, so that they sample the same tokens."""
    assert group is not None
    accelerator = get_accelerator()
    state = accelerator.get_rng_state().to(accelerator.current_device_name())
    dist.broadcast(state, group.global_ranks[0], group=group.handle)
    accelerator.set_rng_state(state.cpu())


def _matrix_numels(model: Any) -> dict[str, int]:
    """Elements of each matrix that the base's AutoTP could divide: not those of embeddings, tied ones included."""
    if not isinstance(model, nn.Module):
        return {}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        f"{name}.{key}" if name else key: parameter.numel()
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and id(parameter) not in tables
    }


def _require_divided(model: Any, before: dict[str, int], ranks: int, group: Any) -> None:
    """Raise ValueError if the base's AutoTP left more of the model whole than LEAST_SHARE allows. A collective.

    What is whole on one rank counts, even if others have nothing of it.
    """
    if not before:
        return
    after = _matrix_numels(model)
    device = get_accelerator().current_device_name()
    largest = torch.tensor([after.get(name, 0) for name in before], dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    whole = {name: numel for (name, numel), most in zip(before.items(), largest.tolist()) if most >= numel}
    share = 1 - sum(whole.values()) / sum(before.values())
    if share < LEAST_SHARE:
        modules = dict(model.named_modules())
        reasons = [(name, type(modules.get(name.rpartition(".")[0])).__name__) for name in whole]
        raise ValueError(refusal(share, ranks, reasons))
