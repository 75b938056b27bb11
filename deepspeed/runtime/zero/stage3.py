"""The base's ZeRO-3 optimizer, with gradients that all ranks agree on before they reduce them.

- A bucket of gradients is reduced only if all ranks have the same one. Where they differ, because ranks ran different
  experts, what all have is reduced at once and the rest is parked until the ranks have met again; a rank that has no
  gradient for a parameter then adds zeros.
- A parameter without a gradient in a whole step counts as having gradient zero, instead of the gradient of some
  earlier step.
- A second backward before the step adds to the gradients of the first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.gather import is_on_disk
from deepspeed.runtime.zero.lockstep import GradientAgreement
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offloaded_states import OffloadedStates, tensors_of
from deepspeed.runtime.zero.own_partition import read_own
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.saved_partitions import SavedPartitions, SubGroup
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from . import _base_stage3
from ._base_stage3 import *  # noqa: F401,F403

_OFFLOADED_HERE = {
    OffloadStateTypeEnum.lp_params,
    OffloadStateTypeEnum.hp_params,
    OffloadStateTypeEnum.optim_states,
}


class DeepSpeedZeroOptimizer_Stage3(_base_stage3.DeepSpeedZeroOptimizer_Stage3):
    """See the base's. It has the base's name, so what the base calls by its private names is overridden here too."""

    def __init__(self, module: Module, init_optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        _refuse_parameters_of_others(module, init_optimizer)
        self._parked: dict[int, Parameter] = {}
        """Gradients that wait until ranks that differ have met again; by the coordinator's number."""
        self._unsteady_gradients: set[int] = set()
        """Parameters that some rank once had no gradient for when others had. The same on all ranks."""
        self._in_step: set[int] = set()
        """``ds_id`` of parameters whose partition holds a gradient of the current step."""
        self._new_in_backward: set[int] = set()
        """Of these, what the backward that is running put there."""
        self._in_last_backward: set[int] = set()
        """``ds_id`` of parameters to which the last backward gave a gradient."""
        self._offloaded: list[OffloadedStates] = []
        self._settled = False
        """All ranks have agreed on what is in the buckets."""
        super().__init__(module, init_optimizer, *args, **kwargs)
        self._coordinator.gradients = self
        self.parameter_offload.restore_whole()
        # Of what may be in host memory, the base has put as much there for good as whole sub-groups take.
        kept_numel = sum(flat.numel() for flat in getattr(self, "param_groups_fp16_flat_cpu_memory", ()))
        self.parameter_offload.limit_host_cache(kept_numel)
        self._share_partitions()

    def initialize_ds_offload(self, *args: Any, **kwargs: Any) -> DeepSpeedZeRoOffload:
        offload = DeepSpeedZeRoOffload(*args, **kwargs, trains=True)
        # The optimizer moves partitions into buffers of its own.
        offload.let_go_of_whole()
        return offload

    def _create_fp32_partitions(self) -> None:
        # The files of the optimizer's state are named by these. Parameters have other numbers in another engine;
        # sub-groups have not, so a checkpoint can be loaded there.
        self.fp16_partitioned_groups_flat_id = [[number] for number in range(len(self.fp16_groups))]
        super()._create_fp32_partitions()

    def initialize_optimizer_states(self) -> None:
        """The base makes another Adagrad, of one group with the default settings, which no scheduler knows."""
        optimizer = self.optimizer
        super().initialize_optimizer_states()
        if self.optimizer is not optimizer:
            optimizer.state.clear()
            optimizer.state.update(self.optimizer.state)
            self.optimizer = optimizer

    # -- what the coordinator asks --

    def ready(self) -> Sequence[int]:
        return sorted(self._number(p) for bucket in self.ipg_buckets.values() for p in bucket.params)

    def parked(self) -> Sequence[int]:
        return sorted(self._parked)

    def settle(self, agreement: GradientAgreement) -> None:
        """Reduce what all ranks agreed on, in one order; keep the rest for later."""
        self._unsteady_gradients |= agreement.park
        for bucket in self.ipg_buckets.values():
            for param in bucket.params:
                # The bucket's memory is used again.
                param.grad.data = param.grad.data.clone()
                self._park(param)
            bucket.clear_params()
        with self._all_agreed():
            for number in sorted(agreement.reduce):
                param = self._parked.pop(number, None)
                if param is None:
                    param = self._coordinator.gatherer.params[number]
                    _set_gradient(param, torch.zeros(param.ds_shape, dtype=param.dtype, device=self._device))
                super().reduce_independent_p_g_buckets_and_remove_grads(param)
            self._reduce_buckets()

    def give_up(self) -> None:
        """Another optimizer trains the parameters from now on."""
        for hook in (*self._grad_acc_hooks, *self._leaf_module_hooks):
            hook.remove()
        self._grad_acc_hooks.clear()
        self._leaf_module_hooks.clear()
        self._drop_unreduced()

    # -- what the base calls --

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Parameter) -> None:
        if id(param) in map(id, self.ipg_buckets[self.get_param_comm_dtype(param)].params):
            # Reentrant checkpointing lets a gradient arrive in parts. Its memory is the bucket's already, so autograd
            # has just added this part to the first.
            return
        if self._number(param) in self._unsteady_gradients:
            self._park(param)
        else:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)

    def __reduce_and_partition_ipg_grads(self, communication_data_type: torch.dtype) -> None:
        if not self._settled and self.ipg_buckets[communication_data_type].params:
            self._coordinator.agree_on_reduction(last=False)
        super().__reduce_and_partition_ipg_grads(communication_data_type)

    def independent_gradient_partition_epilogue(self) -> None:
        self._coordinator.release_backward_leftovers()
        self._coordinator.agree_on_reduction(last=True)
        with self._all_agreed():
            super().independent_gradient_partition_epilogue()
        self._new_in_backward.clear()

    def checkpoint_event_prologue(self) -> None:
        """Partition everything, views too: a checkpoint has placeholders of what is partitioned."""
        super().checkpoint_event_prologue()
        self.parameter_offload.let_go_of_whole()

    def checkpoint_event_epilogue(self) -> None:
        super().checkpoint_event_epilogue()
        self.parameter_offload.restore_whole()

    def load_saved(self, saved: SavedPartitions, load_optimizer_states: bool) -> None:
        """Load what any number of ranks saved.

        Raises:
            ValueError: it is of another model or another optimizer, or its optimizer was on NVMe.
        """
        if self.swap_optimizer:
            raise ValueError(
                f"{saved.folder}: {saved.ranks} ranks saved it; {dist.get_world_size(self.dp_process_group)} ranks can "
                "load it, but not with their optimizer on NVMe. Load it with offload_optimizer on none or cpu."
            )
        rank, ranks = dist.get_rank(self.dp_process_group), dist.get_world_size(self.dp_process_group)
        sub_groups = [
            SubGroup({self.param_names[param]: param.ds_shape for param in group}, self.sub_group_to_group_id[number])
            for number, group in enumerate(self.fp16_groups)
        ]
        state = saved.optimizer(sub_groups, rank, ranks)
        if load_optimizer_states:
            param_groups = len(self.optimizer.param_groups)
            state[OPTIMIZER_STATE_DICT] = saved.optimizer_state(sub_groups, param_groups, rank, ranks)
        self.load_state_dict([state] * ranks, load_optimizer_states=load_optimizer_states)

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """Load a checkpoint.

        With the optimizer on NVMe its files have been copied already, and this loads the rest.
        """
        if self.swap_optimizer:
            self._load_beside_files(state_dict, load_optimizer_states)
            return
        with self._all_flats_in_memory():
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint.

        The base gives all groups of the optimizer the settings of the first, and all sub-groups one count of steps,
        which each of them then advances.
        """
        if self.swap_optimizer:
            raise ValueError(
                f"{checkpoint_dir}: a universal checkpoint cannot be loaded with the optimizer on NVMe. Load it with "
                "offload_optimizer on none or cpu."
            )
        with self._all_flats_in_memory():
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        saved = torch.load(
            Path(checkpoint_dir) / "zero" / "optimizer_state.pt", map_location="cpu", mmap=True, weights_only=False
        )[OPTIMIZER_STATE_DICT]["param_groups"]
        if len(saved) != len(self.optimizer.param_groups):
            raise ValueError(
                f"{checkpoint_dir}: its optimizer has {len(saved)} parameter groups, this one has "
                f"{len(self.optimizer.param_groups)}. Make the optimizer with the groups that it had, or load with "
                "load_optimizer_states=False."
            )
        for group, saved_group in zip(self.optimizer.param_groups, saved):
            group.update({name: value for name, value in saved_group.items() if name != "params"})
        for flat in self.fp32_partitioned_groups_flat:
            state = self.optimizer.state[flat]
            state["step"] = _on_device_of(flat, state["step"])

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(self, *args: Any, **kwargs: Any) -> None:
        with self._all_flats_in_memory():
            super().load_module_checkpoint_state_from_checkpoint_dir_stage3(*args, **kwargs)

    def _restore_from_bit16_weights(self) -> None:
        """Take over new weights. Of sub-groups whose optimizer is on NVMe a checkpoint's files hold them."""
        for number, (flat, master) in enumerate(
            zip(self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat)
        ):
            if flat is not None:
                master.data.copy_(flat.data)
            elif master.numel():
                for param, part in zip(self.fp16_groups[number], self._parts_of(number, master)):
                    part.copy_(read_own(param))

    def _parts_of(self, sub_group: int, flat: Tensor) -> Iterable[Tensor]:
        """Views of a flat tensor, one for each parameter of the sub-group."""
        return flat.data.split([param.partition_numel() for param in self.fp16_groups[sub_group]])

    @contextmanager
    def _all_flats_in_memory(self) -> Iterator[None]:
        """Give sub-groups on NVMe a flat buffer for as long as a checkpoint is loaded; then write it out."""
        flats = self.fp16_partitioned_groups_flat
        on_disk = [number for number, flat in enumerate(flats) if flat is None]
        in_memory = {
            param: param.ds_tensor.data
            for number in on_disk
            for param in self.fp16_groups[number]
            if not is_on_disk(param)
        }
        for number in on_disk:
            flats[number] = torch.zeros(self.fp16_partitioned_groups_flat_numel[number], dtype=self.dtype)
        try:
            yield
        finally:
            for number in on_disk:
                flats[number] = None
            for param, data in in_memory.items():
                param.ds_tensor.data = data
        for number in on_disk:
            if self.fp32_partitioned_groups_flat[number].numel():  # Else the optimizer's swapper has written them.
                self._partitioned_params_swap_out(number)
            for param in self.fp16_groups[number]:
                if param not in in_memory:
                    param.nvme_swapper.remove_partition_and_release_buffers([param])

    def _load_beside_files(self, state_dict: dict[str, Any], load_optimizer_states: bool) -> None:
        """Load what the files of the optimizer do not hold: counts, settings, sub-groups that are too small for one."""
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        saved = state_dict[OPTIMIZER_STATE_DICT]
        self._set_fp32_optimizer_param_groups()
        groups = self.optimizer.param_groups
        flats = [flat for group in groups for flat in group["params"]]
        for number, flat in enumerate(flats):
            self.optimizer.state.pop(flat, None)
            loaded = saved["state"].get(number, {}) if load_optimizer_states else {}
            # What was on disk when it was saved is empty in there.
            on_disk = [name for name, value in loaded.items() if torch.is_tensor(value) and not value.numel()]
            state = {name: _on_device_of(flat, value) for name, value in loaded.items() if name not in on_disk}
            if flat.ds_id in self.optimizer_swapper.swap_params_info:
                state |= self.optimizer_swapper.adopt_state(flat, on_disk)
            if state:
                self.optimizer.state[flat] = state
        if load_optimizer_states:
            for group, saved_group in zip(groups, saved["param_groups"]):
                group.update({name: value for name, value in saved_group.items() if name != "params"})
        self._clear_fp32_optimizer_param_groups()
        for number, flat in enumerate(self.fp32_partitioned_groups_flat):
            if not self._swappable_optimizer_subgroup(number):
                flat.data.copy_(state_dict[FP32_FLAT_GROUPS][number].data)
                self._reassign_or_swap_out_partitioned_parameters(number)

    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Add to what earlier backwards of this step left; replace what is older."""
        micro_step_id = self.micro_step_id
        buffers: list[Tensor] = []
        pairs = list(zip(params_to_release, grad_partitions))
        old = [pair for pair in pairs if pair[0].ds_id in self._in_step]
        new = [pair for pair in pairs if pair[0].ds_id not in self._in_step]
        try:
            # In its micro step 0 the base replaces, in later ones it adds.
            for self.micro_step_id, group in ((0, new), (1, old)):
                if group:
                    params, partitions = zip(*group)
                    buffers.extend(super().partition_grads(list(params), list(partitions)) or ())
        finally:
            self.micro_step_id = micro_step_id
        self._in_step.update(param.ds_id for param, _ in new)
        self._new_in_backward.update(param.ds_id for param, _ in new)
        self._in_last_backward.update(param.ds_id for param, _ in pairs)
        return buffers

    def enter_backward(self) -> None:
        if not self._backward_active_depth:
            self._in_last_backward.clear()
        super().enter_backward()

    def clear_backward_seen_flag(self) -> None:
        if self._backward_active_depth:
            self._abandon_backward()
        super().clear_backward_seen_flag()

    def step(self, closure: Optional[Any] = None) -> None:
        self._reject_without_parameters()
        self._reject_unknown_parameters()
        self._coordinator.agree_on_step()
        self._complete_gradients()
        super().step(closure)
        self.parameter_offload.publish_update()
        self._in_step.clear()
        self._new_in_backward.clear()
        self.parameter_offload.restore_whole()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step, those that were reduced already too."""
        self._drop_unreduced()
        self._in_step.clear()
        self._new_in_backward.clear()
        if set_to_none:
            for param in self._trainable():
                # Where the device has no streams the base fails on a gradient that is still there.
                param.grad = None
        super().zero_grad(set_to_none)

    def offload_states(
        self,
        include: Optional[Container[OffloadStateTypeEnum]] = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move what is in ``include``, or everything, to the host, whatever optimizer it is."""
        self.parameter_offload.let_go_of_whole()
        wanted = [
            s for s in OffloadStateTypeEnum if s not in self.offloaded_states and (include is None or s in include)
        ]
        super().offload_states([s for s in wanted if s not in _OFFLOADED_HERE], device, pin_memory, non_blocking)
        moved = OffloadedStates(pin_memory, non_blocking)
        if OffloadStateTypeEnum.hp_params in wanted:
            moved.move(self.fp32_partitioned_groups_flat)
        if OffloadStateTypeEnum.optim_states in wanted:
            moved.move(tensors_of(self.optimizer))
        if OffloadStateTypeEnum.lp_params in wanted:
            moved.move([self.lp_param_buffer, *(p.ds_tensor for p in self.module.parameters() if not p.requires_grad)])
            self._map_partitions()
        self._offloaded.append(moved)
        self.offloaded_states.update(s for s in wanted if s in _OFFLOADED_HERE)
        _base_stage3.get_accelerator().empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Put everything back on the device."""
        for moved in self._offloaded:
            moved.restore(non_blocking)
        self._offloaded.clear()
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            self._map_partitions()
        self.offloaded_states -= _OFFLOADED_HERE
        super().reload_states(non_blocking)
        self._move_to_store()
        self.parameter_offload.restore_whole()

    def _map_partitions(self) -> None:
        """Make trained partitions parts of ``lp_param_buffer``, wherever that is now."""
        for partition, offset, numel in _base_stage3.get_mapping_to_flat_buffer(self._get_parameter_partitions()):
            partition.data = self.lp_param_buffer.narrow(0, offset, numel)
        self.fp16_partitioned_groups_flat.clear()
        self._set_fp16_partitioned_groups_flat()

    def destroy(self) -> None:
        self._coordinator.gradients = None
        super().destroy()
        if self.swap_optimizer:
            self.optimizer_swapper.close()

    # -- what other ranks read --

    def _share_partitions(self) -> None:
        """Let other ranks read this one's partitions, if that is possible."""
        in_flats = [
            param
            for group, flat in zip(self.fp16_groups, self.fp16_partitioned_groups_flat)
            if flat is not None
            for param in group
        ]
        if self.parameter_offload.share_by_rank(in_flats) is not None:
            self._move_to_store()
            self.parameter_offload.publish_update()

    def _move_to_store(self) -> None:
        """Make the flat buffers, of which partitions are parts, memory that other ranks can read."""
        store = self.parameter_offload.store
        in_flats = [n for n, flat in enumerate(self.fp16_partitioned_groups_flat) if flat is not None]
        if store is None or not in_flats:
            return
        span = store.own_span([self._number(param) for n in in_flats for param in self.fp16_groups[n]])
        offset = 0
        for n in in_flats:
            flat = self.fp16_partitioned_groups_flat[n]
            room = span.narrow(0, offset, flat.numel())
            room.copy_(flat)
            flat.data = room
            self._unflatten_partitioned_parameters(n)
            offset += flat.numel()
        if self.offload_param:
            for buffer in self.param_groups_fp16_flat_cpu_memory:
                _base_stage3.get_accelerator().unpin_memory(buffer)
            self.param_groups_fp16_flat_cpu_memory.clear()
        else:
            self.lp_param_buffer.data = span

    # -- parts --

    @property
    def _coordinator(self) -> Any:
        return self.parameter_offload.get_param_coordinator()

    @property
    def _device(self) -> torch.device:
        return torch.device(_base_stage3.get_accelerator().current_device_name())

    def _number(self, param: Parameter) -> int:
        return int(self._coordinator.gatherer.index_of(param))

    @contextmanager
    def _all_agreed(self) -> Iterator[None]:
        self._settled = True
        try:
            yield
        finally:
            self._settled = False

    def _reduce_buckets(self) -> None:
        for dtype in list(self.ipg_buckets):
            self.__reduce_and_partition_ipg_grads(dtype)

    def _abandon_backward(self) -> None:
        """A backward ended in an exception: drop what it left."""
        self._backward_active_depth = 0
        self._drop_unreduced()
        self._in_step -= self._new_in_backward
        self._new_in_backward.clear()

    def _drop_unreduced(self) -> None:
        for bucket in self.ipg_buckets.values():
            for param in bucket.params:
                param.grad = None
            bucket.clear_params()
        for param in self._parked.values():
            param.grad = None
        self._parked.clear()

    def _park(self, param: Parameter) -> None:
        self._parked[self._number(param)] = param

    def _trainable(self) -> Iterable[Parameter]:
        return (param for group in self.fp16_groups for param in group if param.requires_grad)

    def _complete_gradients(self) -> None:
        """Zeros for parameters that had no gradient in this step; and to the host what the last backward did not bring.

        The base hands gradients to an optimizer on the host or on NVMe only as they arrive in the last backward of a
        step.
        """
        partitions = self.__param_id_to_grad_partition
        fp32_gradients: dict[int, list[Tensor]] = {}
        fp32_offsets: dict[int, list[int]] = {}
        for param in self._trainable():
            if param.ds_id not in partitions or param.ds_id in self._in_last_backward:
                continue
            partition = partitions[param.ds_id]
            if param.ds_id not in self._in_step:
                partition.zero_()
            has_elements = param.partition_numel() * self._get_param_partition_rank(param) < param.ds_numel
            if self.offload_optimizer and has_elements:
                on_device = partition.to(self._device)
                self._offload_grad_partition_at_boundary(param, on_device, fp32_gradients, fp32_offsets)
        self._swap_out_offload_fp32_gradients(fp32_gradients, fp32_offsets)

    def _reject_without_parameters(self) -> None:
        if self.parameter_offload.has_left:
            raise RuntimeError(
                f"step() of an engine that has given up {type(self.module).__name__}: it was destroyed, or "
                "deepspeed.initialize was called with the same model again. Call that engine's step()."
            )

    def _reject_unknown_parameters(self) -> None:
        for name, param in self.module.named_parameters():
            if param.requires_grad and not hasattr(param, "ds_id"):
                raise RuntimeError(
                    f"parameter {name} was added to the model after deepspeed.initialize: it is neither partitioned "
                    "nor known to the optimizer, and its gradient is not reduced over the ranks. Add it before "
                    "deepspeed.initialize, or give it requires_grad=False if it is not to be trained."
                )


def _on_device_of(flat: Tensor, value: Any) -> Any:
    """A copy of an optimizer's state, where it has to be: counts stay on the host."""
    if not torch.is_tensor(value):
        return value
    return value.clone() if value.dim() == 0 else value.to(flat.device, copy=True)


def _set_gradient(param: Parameter, gradient: Tensor) -> None:
    """Give ``param`` a gradient of its whole shape, though it may be partitioned."""
    data = param.data
    # torch compares shapes when a gradient is assigned.
    param.data = torch.empty(1, dtype=param.dtype, device=param.device).expand(param.ds_shape)
    param.grad = gradient
    param.data = data


def _refuse_parameters_of_others(module: Module, optimizer: Optimizer) -> None:
    """Raises a ValueError if the optimizer is to train what neither is in the module nor was partitioned before."""
    own = {id(param) for param in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if p.requires_grad and id(p) not in own and not hasattr(p, "ds_id")]
        if strange:
            raise ValueError(
                f"{len(strange)} of the {len(group['params'])} parameters in group {number} of the optimizer are not "
                f"in the model ({type(module).__name__}); the first has the shape {tuple(strange[0].shape)}. The "
                "optimizer was made for another model, or before parameters of this one were replaced (by a copy, by "
                "adapters, by resizing an embedding). Make it from the parameters of the model that "
                "deepspeed.initialize gets."
            )
