"""Hooks that tell the coordinator what modules do, and what it takes to find parameters that a module reads of another.

A module has hooks only if it needs something that is not always whole. Its output tensors get a tensor hook each when
gradients are recorded; nothing is put into the autograd graph and no tensor or container is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, Optional

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero.fetch_plan import Budgets
from deepspeed.runtime.zero.gather import Gatherer, is_on_disk
from deepspeed.runtime.zero.gather_mode import GatherMode
from deepspeed.runtime.zero.granularity import find_leaves
from deepspeed.runtime.zero.guard import Init, remove_guard
from deepspeed.runtime.zero.lockstep import DEFAULT_TIMEOUT_S, LockstepError, Peers
from deepspeed.runtime.zero.lone_generate import generate_alone
from deepspeed.runtime.zero.node_store import NodeStore
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, _init_external_params
from deepspeed.runtime.zero.partitioned_param_coordinator import (
    Node,
    PartitionedParameterCoordinator,
    Use,
    iter_params,
)
from deepspeed.runtime.zero.residents import Residents, is_resident, partition_of
from deepspeed.runtime.zero.shared_updates import load_together, remove_caretaker, set_caretaker
from deepspeed.runtime.zero.sharing import share_partitions
from deepspeed.runtime.zero.tensor_tree import tensors_in
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import logger, set_z3_leaf_module, z3_leaf_module
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

_FILES_WITHOUT_FORWARDS = (torch.nn.modules.module.__file__, torch.nn.modules.container.__file__)


class ZeROOrderedDict(dict):
    """A module's ``_parameters``: notices when a parameter is read that is not whole.

    A copy of it (``copy.deepcopy``, pickle) is a plain dict: the copied module belongs to no engine.
    """

    def __init__(self, parent_module: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parent_module = parent_module
        self._in_forward = False
        """Set by the engine around its forward; only code of DeepCompile reads it."""
        self._offload: Optional[DeepSpeedZeRoOffload] = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)

    def __getitem__(self, key: str) -> Any:
        param = super().__getitem__(key)
        if param is None:
            return None
        # Whether a parameter is whole must not become a guard of compiled code.
        if torch.compiler.is_compiling():
            return param
        status = getattr(param, "ds_status", None)
        if status is not None and status is not ZeroParamStatus.AVAILABLE:
            if self._offload is not None:
                self._offload.read_while_partitioned(self._parent_module, param)
            if self._in_forward and param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                _fall_back_to_eager(param)
        elif self._in_forward and status is not None:
            _note_eager_access(param)
        return param


def _fall_back_to_eager(param: Parameter) -> None:
    """Under DeepCompile, which takes the hooks away, code that is not compiled gathers what it reads."""
    from deepspeed.compile.z3_eager_fallback import get_active_z3_eager_fallback, is_dynamo_guard_evaluation

    fallback = get_active_z3_eager_fallback()
    if fallback is None:
        return
    if is_dynamo_guard_evaluation():
        # A guard looks at identity and metadata only.
        fallback.record_guard_suppressed_param(param)
        return
    param.all_gather()
    fallback.record_gathered_param(param)


def _note_eager_access(param: Parameter) -> None:
    compile_fallback = sys.modules.get("deepspeed.compile.z3_eager_fallback")
    fallback = compile_fallback.get_active_z3_eager_fallback() if compile_fallback is not None else None
    if fallback is not None and not compile_fallback.is_dynamo_guard_evaluation():
        fallback.record_param_access(param)


def ensure_zero_ordered_dict(module: Module) -> None:
    """Make ``module._parameters`` a `ZeROOrderedDict`, if it is a dict of another kind. Called again, does nothing."""
    parameters = getattr(module, "_parameters", None)
    if isinstance(parameters, dict) and not isinstance(parameters, ZeROOrderedDict):
        if not hasattr(module, "_original_parameters"):
            module._original_parameters = parameters
        module._parameters = ZeROOrderedDict(module, parameters)


class ExternalParameters(dict):
    """A module's ``_external_params``: tells when one is registered."""

    def __init__(self, offload: DeepSpeedZeRoOffload, module: Module, items: Mapping[int, Parameter]) -> None:
        super().__init__(items)
        self.offload = offload
        self._module = module

    def __setitem__(self, key: int, param: Parameter) -> None:
        known = key in self
        super().__setitem__(key, param)
        if not known:
            self.offload.external_parameter_registered(self._module, param)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class DeepSpeedZeRoOffload:
    """The ZeRO-3 runtime of one engine: partitions the model's parameters, and has them whole where they are used.

    The arguments are those of a ds_config's ``zero_optimization``, in elements; ``module`` is the model. An optimizer
    ``trains`` it, which will call `share_by_rank`; without one, partitions are shared at once, if they can be.

    Raises:
        ValueError: ``stage3_gather`` is ``node``, and that is not possible.
    """

    def __init__(
        self,
        module: Module,
        timers: Any,
        ds_config: Any,
        zenflow: bool = False,
        overlap_comm: bool = True,
        prefetch_bucket_size: float = 50_000_000,
        max_reuse_distance: float = 1_000_000_000,
        max_live_parameters: float = 1_000_000_000,
        param_persistence_threshold: float = 100_000,
        model_persistence_threshold: float = sys.maxsize,
        dp_process_group: Any = None,
        offload_param_config: Any = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        zero_module_granularity_threshold: int = 0,
        log_trace_cache_warnings: bool = False,
        trains: bool = False,
    ) -> None:
        self.module = module
        self.trains = trains
        self.has_left = False
        """It has nothing on the model any more: its engine was destroyed, or another one has taken over."""
        self.timers = timers
        self.zenflow = zenflow
        self.dtype = next(module.parameters()).dtype
        self.dp_process_group = dp_process_group
        self.offload_device: Optional[OffloadDeviceEnum] = None
        self.offload_param_pin_memory = False
        if offload_param_config is not None and offload_param_config.device != OffloadDeviceEnum.none:
            self.offload_device = offload_param_config.device
            self.offload_param_pin_memory = offload_param_config.pin_memory
        self.zero_param_parallel_group = zero_param_parallel_group
        self.zero_quantized_weights = zero_quantized_weights
        self.zero_quantized_nontrainable_weights = zero_quantized_nontrainable_weights

        for earlier in runtimes_of(module):
            self._take_over(earlier)
        self._partition_parameters(ds_config, mpu)
        params = _distinct(module.parameters())
        self._undo: list[Callable[[], None]] = []
        """What takes off the model what is no hook."""
        settings = ds_config.get("zero_optimization", {}) if isinstance(ds_config, Mapping) else {}
        settings = settings if isinstance(settings, Mapping) else {}
        timeout_s = float(settings.get("stage3_lockstep_timeout_s", DEFAULT_TIMEOUT_S))
        self._gather_mode = GatherMode(settings.get("stage3_gather", GatherMode.AUTO))
        self._peers = self._find_peers(timeout_s)
        store = None if trains else self._share(params, together=None)
        self._residents = self._find_residents(params, store)
        self._base_methods = [(p, p.all_gather, p.partition) for p in params]
        for param, all_gather, partition in self._base_methods:
            param.all_gather = partial(self._gather_between, param, all_gather)
            param.partition = partial(self._partition_between, param, partition)
            set_caretaker(param, self)
        self.persistent_parameters = self.mark_persistent_parameters(
            int(param_persistence_threshold), int(model_persistence_threshold)
        )
        if zero_module_granularity_threshold > 0:
            self._declare_leaves(zero_module_granularity_threshold)

        self._budgets = Budgets(
            prefetch_numel=int(prefetch_bucket_size),
            live_numel=int(max_live_parameters),
            reuse_numel=int(max_reuse_distance),
        )
        on_cpu = torch.device(get_accelerator().current_device_name()).type == "cpu"
        self.param_coordinator = PartitionedParameterCoordinator(
            Gatherer(
                timeout_s,
                quantized_weights=zero_quantized_weights,
                quantizes=zero_quantized_weights or zero_quantized_nontrainable_weights,
                stream=_gather_stream(overlap_comm),
                connection=self._peers.connection if self._peers is not None and on_cpu else None,
                store=store,
            ),
            self._budgets,
            self._peers,
            log_trace_cache_warnings,
        )
        self.param_coordinator.reads_alone = store is not None
        if zenflow:
            self.param_coordinator.on_hold = self.param_coordinator.on_unhold = self._transpose
        self._indices: dict[Module, int] = {}
        """Each module's place in the model, the same on all ranks."""
        self._modules: dict[int, Module] = {}
        self._names: dict[Module, str] = {}
        self._nodes: dict[Module, Node] = {}
        self._opened_leaves: set[Module] = set()
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []
        """Always empty: backward hooks sit on output tensors and go with them."""
        self._watch_parameters()
        self.setup_zero_stage3_hooks()
        self.restore_whole()

    # -- names that others know --

    def get_param_coordinator(self) -> PartitionedParameterCoordinator:
        return self.param_coordinator

    def partition_all_parameters(self) -> None:
        """Partition every parameter, persistent ones too, except what is a view of its partition."""
        self.param_coordinator.release_and_reset_all(self.module)
        self._residents.drop_copies()

    def empty_partition_cache(self) -> None:
        self.partition_all_parameters()

    def release_backward_leftovers(self) -> None:
        self.param_coordinator.release_backward_leftovers()

    def destroy(self) -> None:
        """Take everything off the model that was put on it. Its parameters stay partitioned."""
        swappers = self._swappers()
        self._leave()
        for swapper in swappers:
            swapper.close()

    def give_up(self) -> None:
        """Another engine takes care of the parameters from now on."""
        if self.param_coordinator.gradients is not None:
            self.param_coordinator.gradients.give_up()
        self.partition_all_parameters()
        self._leave()

    def _leave(self) -> None:
        if self.has_left:
            return
        self.has_left = True
        self._remove_module_hooks()
        for part in self.module.modules():
            if isinstance(part._parameters, ZeROOrderedDict):
                part._parameters._offload = None
            if isinstance(part.__dict__.get("_external_params"), ExternalParameters):
                part._external_params = dict(part._external_params)
        for param, all_gather, partition in self._base_methods:
            param.all_gather = all_gather
            param.partition = partition
            remove_caretaker(param, self)
        for param in self.persistent_parameters:
            param.ds_persist = False
        if self.store is not None:
            for undo in self._undo:
                undo()
            self._residents.dismiss()
            self.store.close()
            self.param_coordinator.gatherer.store = None
        self.param_coordinator.close()
        # What is on NVMe belongs to whoever comes next.
        self._base_methods = []

    def _take_over(self, earlier: DeepSpeedZeRoOffload) -> None:
        own = {id(p) for p in self.module.parameters()}
        left = next((name for name, p in earlier.module.named_parameters() if id(p) not in own), None)
        if left is None:
            earlier.give_up()
        elif earlier.store is not None:
            raise ValueError(
                f"{type(self.module).__name__} has some parameters of {type(earlier.module).__name__}, for which "
                f"another engine cares, but not all of them (not {left}), and the ranks share those. Destroy that "
                "engine before, make one engine of both models, or set zero_optimization.stage3_gather of that engine "
                "to collective."
            )

    def _swappers(self) -> list[AsyncPartitionedParameterSwapper]:
        """What keeps partitions on NVMe: one, or none, if all was partitioned at once."""
        return list({id(p.nvme_swapper): p.nvme_swapper for p, *_ in self._base_methods if p.nvme_swapper}.values())

    def limit_host_cache(self, kept_numel: int) -> None:
        """Of the elements that may be in host memory (``max_in_cpu``), ``kept_numel`` are there for good."""
        for swapper in self._swappers():
            swapper.cache.limit_numel = max(0, swapper.cache.limit_numel - kept_numel)

    def setup_zero_stage3_hooks(self) -> None:
        self._register_deepspeed_module(self.module)

    def _remove_module_hooks(self) -> None:
        for hook in (*self.forward_hooks, *self.backward_hooks):
            hook.remove()
        self.forward_hooks = []
        self.backward_hooks = []

    def _register_deepspeed_module(self, module: Module, count: Any = None) -> None:
        """Put the hooks on ``module`` and what is in it; those that are there already are taken off first."""
        if module is self.module:
            self._remove_module_hooks()
            self.param_coordinator.forget_paths()
        for name, part in self.module.named_modules():
            self._names[part] = name or type(part).__name__
            self._modules[self._indices.setdefault(part, len(self._indices))] = part
        for part, around in list(self._walk()):
            part.ds_id = self._indices[part]
            self._attach(part, around)

    def restore_hooks(self) -> None:
        """Put hooks back, if they were taken off."""
        if not self.has_left and not self.forward_hooks:
            self._register_deepspeed_module(self.module)

    def mark_persistent_parameters(self, param_threshold: int, model_threshold: int) -> list[Parameter]:
        """Mark parameters of at most ``param_threshold`` elements, ``model_threshold`` in all, as persistent."""
        if self.zenflow:
            return []  # Each is turned when a module begins to use it, so each has to be held.
        persistent: list[Parameter] = []
        total_numel = 0
        for param in self.module.parameters():
            if is_resident(param):
                continue
            small = param.ds_numel <= param_threshold and total_numel + param.ds_numel <= model_threshold
            if small or not param.ds_numel:
                param.ds_persist = True
                persistent.append(param)
                total_numel += param.ds_numel
        return persistent

    # -- what is always whole --

    def restore_whole(self) -> None:
        """Make what always is whole so, if something else has happened to it."""
        self._residents.restore()

    def let_go_of_whole(self) -> None:
        """Let partitions be moved that parameters are views of. `restore_whole` undoes it."""
        self._residents.let_go()

    # -- what other ranks read --

    @property
    def store(self) -> Optional[NodeStore]:
        """Where ranks read each other's partitions; None if they do not."""
        return self.param_coordinator.gatherer.store

    def share_by_rank(self, together: Sequence[Parameter]) -> Optional[NodeStore]:
        """Let other ranks read this one's partitions, those of ``together`` side by side. A collective.

        Partitions have their new memory when this returns, but nobody reads it before the next update is published.
        None if it is not possible, or there is nobody to read them.

        Raises:
            ValueError: ``stage3_gather`` is ``node``, and it is not possible.
        """
        numbers = [self.param_coordinator.gatherer.index_of(param) for param in together]
        self.param_coordinator.gatherer.store = self._share(_distinct(self.module.parameters()), numbers)
        return self.store

    def agree_on_update(self) -> None:
        """Nobody reads this rank's partitions any more when this returns. A collective, where other ranks do."""
        self.param_coordinator.agree_on_update()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """This rank's partitions are changed in here. A collective, where other ranks read them."""
        self.agree_on_update()
        yield
        self.publish_update()

    def _is_lent(self, param: Parameter) -> bool:
        return is_zero_param(param) and self._residents.is_lent(param)

    def publish_update(self) -> None:
        """All ranks have changed their partitions when this returns."""
        if self.store is not None and self._peers is not None:
            for swapper in self._swappers():
                swapper.publish(self._peers)
        self.param_coordinator.publish_update()

    def _share(self, params: Sequence[Parameter], together: Optional[Sequence[int]]) -> Optional[NodeStore]:
        if self._peers is None:
            if self._gather_mode is GatherMode.NODE and any(p.ds_zero_partition_world_size > 1 for p in params):
                raise ValueError(
                    "stage3_gather: node is not possible, since parameters are partitioned over several process "
                    "groups. Set it to auto or collective."
                )
            return None
        hindrance = "ZenFlow keeps weights in a layout of its own" if self.zenflow else ""
        if self.zero_quantized_weights or self.zero_quantized_nontrainable_weights:
            hindrance = "weights are quantized"
        store = share_partitions(params, self._peers, self._gather_mode, hindrance, together)
        if store is not None:
            self._undo.append(generate_alone(self.module))
            self._undo.append(load_together(self.module, self.updating, self._is_lent))
        return store

    def _find_residents(self, params: Sequence[Parameter], store: Optional[NodeStore]) -> Residents:
        """Those that can be used where they are kept."""
        if store is None:
            return Residents([] if self.zenflow else [p for p in params if _can_alias(p)], partition_of)
        numbers = {p.ds_id: n for n, p in enumerate(params)}
        on_cpu = torch.device(get_accelerator().current_device_name()).type == "cpu"
        whole = [p for n, p in enumerate(params) if n in store and store.whole(n) is not None] if on_cpu else []
        return Residents(whole, lambda param: store.whole(numbers[param.ds_id]), is_shared=True)

    def _gather_between(
        self,
        param: Parameter,
        all_gather: Callable[..., Any],
        param_list: Optional[Iterable[Parameter]] = None,
        async_op: bool = False,
        hierarchy: int = 0,
    ) -> Any:
        """In the place of ``param.all_gather``, which leaves out what is in flight."""
        self.param_coordinator.wait_for_flight()
        params = [param] if param_list is None else list(param_list)
        others = [p for p in params if not is_resident(p)]
        self._residents.restore(p for p in params if is_resident(p))
        if param_list is not None:
            self._residents.lend(p for p in params if is_resident(p))
        if not others:
            return None
        if self.param_coordinator.reads_alone:
            self.param_coordinator.read_whole(others)
            return None
        return all_gather(others, async_op=async_op, hierarchy=hierarchy)

    def _partition_between(
        self,
        param: Parameter,
        partition: Callable[..., None],
        param_list: Optional[Iterable[Parameter]] = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """In the place of ``param.partition``: what a running module uses stays whole; updates are kept."""
        params = [param] if param_list is None else list(param_list)
        with self.updating() if has_been_updated else nullcontext():
            self._residents.take_back((p for p in params if is_resident(p)), has_been_updated)
            others = [p for p in params if not is_resident(p)]
            for each in others if has_been_updated else ():
                if is_on_disk(each):
                    each.nvme_swapper.make_room_for_update(each)
            held = [p for p in others if self.param_coordinator.is_held(p)]
            free = [p for p in others if not self.param_coordinator.is_held(p)]
            if free:
                partition(free, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
            for each in held if has_been_updated else ():
                data, users = each.data, set(each.ds_active_sub_modules)
                each.ds_active_sub_modules.clear()
                partition([each], hierarchy=hierarchy, has_been_updated=True)
                each.data = data
                each.ds_status = ZeroParamStatus.AVAILABLE
                each.ds_active_sub_modules.update(users)

    def _transpose(self, index: int) -> None:
        """ZenFlow keeps matrices transposed; they are turned while modules use them."""
        param = self.param_coordinator.gatherer.params[index]
        if len(param.ds_shape) != 1:
            param.data = param.data.t()

    # -- what hooks call --

    def _before_forward(self, node: Node, module: Module) -> None:
        coordinator = self.param_coordinator
        if module not in self._indices:
            return  # A copy of one of ours, which took the hooks along.
        if module is self.module and coordinator.innermost is not None and not self._is_recursive(sys._getframe(1)):
            coordinator.abandon_forward()
        if not torch.is_grad_enabled() and not coordinator.is_running and self._is_gathered(module):
            return
        coordinator.enter(node, self._indices[module], torch.is_grad_enabled())

    def _is_gathered(self, module: Module) -> bool:
        """Whether somebody else has made all of ``module`` whole: `GatheredParameters`.

        All ranks came to that, so none waits here for one that does not run the module.
        """
        gatherer = self.param_coordinator.gatherer
        needs_anything = False
        for param in iter_params(module, recurse=True):
            if not is_zero_param(param) or param.ds_persist:
                continue
            needs_anything = True
            if param.ds_status is not ZeroParamStatus.AVAILABLE or gatherer.index_of(param) in gatherer.whole:
                return False
        return needs_anything

    def _after_forward(self, node: Node, module: Module, output: Any) -> None:
        coordinator = self.param_coordinator
        use = coordinator.leave(node) if module in self._indices else None
        if use is None:
            return
        grad = torch.is_grad_enabled()
        if not coordinator.is_running:
            coordinator.end_pass(grad)
        elif type(output) is not torch.Tensor:
            self._keep_returned_parameters(module, output)
        if grad and use.needs_anything:
            for tensor in tensors_in(output):
                # A leaf was not computed here.
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(partial(self._before_backward, use))

    def _before_backward(self, use: Use, grad: torch.Tensor) -> None:
        self.param_coordinator.enter_backward(use)

    def _after_failed_root_forward(self, node: Node, module: Module) -> None:
        """Called after a forward that returned, too: then there is nothing to do."""
        coordinator = self.param_coordinator
        if module not in self._indices or coordinator.leave(node) is None or coordinator.is_running:
            return
        if isinstance(sys.exc_info()[1], LockstepError):
            return  # The others are not there.
        coordinator.end_pass(grad=False)

    def _is_recursive(self, frame: Optional[FrameType]) -> bool:
        """Whether the root calls itself, rather than being called again after something that no hook saw the end of."""
        calls = 0
        while frame is not None:
            calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is self.module
            frame = frame.f_back
        return calls > 1

    def read_while_partitioned(self, owner: Module, param: Parameter) -> None:
        """``param`` of ``owner`` is read and is not whole."""
        if not self.param_coordinator.is_running:
            return
        reader = self._reading_module(sys._getframe(2))
        if reader is None or (reader is owner and not self.param_coordinator.is_in_forward_of(self._indices[owner])):
            # Code that is no method of a module, or a list of parameters: whoever runs reads it.
            reader = self._innermost()
        self._read_outside(reader, param)

    def external_parameter_registered(self, module: Module, param: Parameter) -> None:
        if not is_zero_param(param) or param.ds_persist:
            return
        node = self._nodes.get(module)
        if node is not None:
            self.param_coordinator.add_external(node, param)
        elif module in self._indices and self.forward_hooks:
            self._attach(module, self._around(module))

    # -- finding who reads --

    def _innermost(self) -> Module:
        index = self.param_coordinator.innermost
        return self.module if index is None else self._modules[index]

    def _read_outside(self, reader: Module, param: Parameter) -> None:
        if id(param) not in reader._external_params and not any(param is own for own in reader._parameters.values()):
            reader._external_params[id(param)] = param
        self.param_coordinator.read_outside(param)

    def _keep_returned_parameters(self, module: Module, output: Any) -> None:
        """A parameter that a module returns is used by whoever called it."""
        for tensor in tensors_in(output):
            if isinstance(tensor, Parameter) and is_zero_param(tensor) and not tensor.ds_persist:
                caller = self._reading_module(sys._getframe(2), besides=module) or self.module
                self._read_outside(caller, tensor)

    def _reading_module(self, frame: Optional[FrameType], besides: Optional[Module] = None) -> Optional[Module]:
        """The module whose code is running: the nearest ``self`` on the stack that is one of the model's modules."""
        while frame is not None:
            candidate = frame.f_locals.get("self")
            in_torch = frame.f_code.co_filename in _FILES_WITHOUT_FORWARDS
            if (
                isinstance(candidate, Module)
                and not in_torch
                and candidate is not besides
                and candidate in self._indices
            ):
                return candidate
            frame = frame.f_back
        return None

    # -- setting up --

    def _partition_parameters(self, ds_config: Any, mpu: Any) -> None:
        others = [p for p in self.module.parameters() if not is_zero_param(p)]
        if not others:
            return
        partitioned = next((p for p in self.module.parameters() if is_zero_param(p)), None)
        if partitioned is not None:
            _take_from_first_rank(others, partitioned.ds_process_group)
            partitioned.convert_to_zero_parameters(param_list=others)
            return
        # An mpu of sequence parallelism alone has no data-parallel group.
        group = mpu.get_data_parallel_group() if hasattr(mpu, "get_data_parallel_group") else None
        placement = {"remote_device": self.offload_device, "pin_memory": self.offload_param_pin_memory}
        quantization = {
            name: getattr(self, name) for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
        }
        Init(
            self.module,
            dtype=self.dtype,
            mpu=mpu,
            data_parallel_group=group,
            zero_param_parallel_group=self.zero_param_parallel_group,
            config_dict_or_path=ds_config,
            **placement,
            **quantization,
        )

    def _find_peers(self, timeout_s: float) -> Optional[Peers]:
        params = list(self.module.parameters())
        groups = {id(p.ds_process_group): p.ds_process_group for p in params}
        if all(p.ds_zero_partition_world_size == 1 for p in params):
            return None
        if len(groups) > 1:
            logger.warning(
                "ZeRO-3: the parameters of %s are partitioned over %d process groups; whether their ranks are in step "
                "is not checked.",
                type(self.module).__name__,
                len(groups),
            )
            return None
        (group,) = groups.values()
        return Peers(group, timeout_s)

    def _declare_leaves(self, threshold_numel: int) -> None:
        leaves, finest = find_leaves(self.module, threshold_numel)
        for leaf in leaves:
            set_z3_leaf_module(leaf, True)
        if not leaves and finest is not None:
            logger.warning(
                "stage3_module_granularity_threshold=%d has no effect: the finest module, %s, has %d elements a layer",
                threshold_numel,
                type(finest.module).__name__,
                finest.numel_per_layer,
            )

    def _watch_parameters(self) -> None:
        coordinator = self.param_coordinator
        for name, param in self.module.named_parameters():
            coordinator.gatherer.register(param, name)
        coordinator.set_persistent(self.persistent_parameters)
        numbers = {p.ds_id: coordinator.gatherer.index_of(p) for p, *_ in self._base_methods}
        for swapper in self._swappers():
            swapper.cache.next_use = partial(_steps_until_use, coordinator, numbers)
        for part in self.module.modules():
            remove_guard(part)
            _init_external_params(part)
            part._external_params = ExternalParameters(self, part, part._external_params)
            if any(p is not None and not is_resident(p) for p in part._parameters.values()):
                ensure_zero_ordered_dict(part)
                part._parameters._offload = self

    def _attach(self, module: Module, around: frozenset[int]) -> None:
        """Give ``module`` hooks, if it is the root or needs what is not always whole."""
        is_root = module is self.module
        runs_passes = is_root and not all(is_resident(p) for p in self.module.parameters() if is_zero_param(p))
        if is_root and self.store is not None and not runs_passes:
            # Else the coordinator does it, with each module.
            show_progress = self.store.show_progress
            self.forward_hooks.append(module.register_forward_pre_hook(lambda called, args: show_progress()))
        if is_root and self._residents.params and self.store is None:

            def restore(called: Module, args: Any) -> None:
                self.restore_whole()

            self.forward_hooks.append(module.register_forward_pre_hook(restore))
        own = [p for p in _distinct(module.parameters(recurse=self._is_leaf(module))) if is_zero_param(p)]
        needed = [p for p in own if not p.ds_persist]
        external = [p for p in module._external_params.values() if is_zero_param(p) and not p.ds_persist]
        if not needed and not external and not runs_passes:
            return
        node = self._nodes.get(module)
        if node is None:
            index = self._indices[module]
            node = self.param_coordinator.add_node(index, self._names[module], needed, around)
            self._nodes[module] = node
        for param in external:
            self.param_coordinator.add_external(node, param)

        # Plain functions, since copy.deepcopy of a model follows what bound methods are bound to.
        def before(called: Module, args: Any) -> None:
            self._before_forward(node, called)

        def after(called: Module, args: Any, output: Any) -> None:
            self._after_forward(node, called, output)

        def after_failure(called: Module, args: Any, output: Any) -> None:
            self._after_failed_root_forward(node, called)

        self.forward_hooks.append(module.register_forward_pre_hook(before))
        self.forward_hooks.append(module.register_forward_hook(after))
        if is_root:
            self.forward_hooks.append(module.register_forward_hook(after_failure, always_call=True))

    def _is_leaf(self, module: Module) -> bool:
        """Whether ``module`` is fetched as one: if it was declared a leaf, and fits."""
        if not z3_leaf_module(module):
            return False
        numel = sum(p.ds_numel for p in _distinct(module.parameters()) if is_zero_param(p) and not p.ds_persist)
        if numel <= self._budgets.live_numel:
            return True
        if module not in self._opened_leaves:
            self._opened_leaves.add(module)
            logger.warning(
                "ZeRO-3: the leaf module %s needs %d elements, more than stage3_max_live_parameters=%d: the modules in "
                "it are fetched one by one instead. Raise the limit to fetch it as one.",
                self._names.get(module, type(module).__name__),
                numel,
                self._budgets.live_numel,
            )
        return False

    def _walk(self) -> Iterator[tuple[Module, frozenset[int]]]:
        """Modules that may get hooks, outer ones first, each once; with the numbers of the modules around it."""
        seen: set[Module] = set()
        pending: list[tuple[Module, frozenset[int]]] = [(self.module, frozenset())]
        while pending:
            part, around = pending.pop()
            if part in seen:
                continue
            seen.add(part)
            yield part, around
            if not self._is_leaf(part):
                inside = around | {self._indices[part]}
                pending.extend((child, inside) for child in reversed(list(part.children())))

    def _around(self, module: Module) -> frozenset[int]:
        return next((around for part, around in self._walk() if part is module), frozenset())


class GuestOffload(DeepSpeedZeRoOffload):
    """What an engine without an optimizer has for a runtime when another engine takes care of its model already.

    Everything is done by that one's (``host``). The end of the guest changes nothing for it.
    """

    def __init__(self, host: DeepSpeedZeRoOffload) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        # What no attribute of the class is.
        return getattr(self.__dict__["_host"], name)

    def _register_deepspeed_module(self, module: Module, count: Any = None) -> None:
        self._host._register_deepspeed_module(module, count)

    def destroy(self) -> None:
        """Leave everything to the host."""


def runtimes_of(module: Module) -> list[DeepSpeedZeRoOffload]:
    """Those of living engines that take care of ``module`` or a part of it."""
    registered = (part.__dict__.get("_external_params") for part in module.modules())
    found = (external.offload for external in registered if isinstance(external, ExternalParameters))
    return list({id(offload): offload for offload in found}.values())


def host_for(module: Module) -> Optional[DeepSpeedZeRoOffload]:
    """Who takes care of all of ``module`` already and should go on with it, if it is not to be trained here.

    That is an engine that trains, or one of a larger model.
    """
    params = {id(p) for p in module.parameters()}
    for offload in runtimes_of(module):
        held = {id(p) for p in offload.module.parameters()}
        if params <= held and (offload.trains or params < held):
            return offload
    return None


def _take_from_first_rank(params: Iterable[Parameter], group: Any) -> None:
    """Give each rank rank 0's values, so that parts of different random values do not get into one parameter.

    Each rank for itself adds adapters to a model that was made under `deepspeed.zero.Init`. Where nothing is
    partitioned yet, the base's `Init` takes rank 0's values, too.
    """
    device = torch.device(get_accelerator().current_device_name())
    source = dist.get_global_rank(group, 0)
    for param in params:
        param.data = param.data.to(device).contiguous()
        dist.broadcast(param.data, src=source, group=group)


def _distinct(params: Iterable[Parameter]) -> list[Parameter]:
    return list({id(p): p for p in params}.values())


def _steps_until_use(
    coordinator: PartitionedParameterCoordinator, numbers: Mapping[int, Optional[int]], ds_id: int
) -> Optional[int]:
    number = numbers.get(ds_id)
    return coordinator.steps_until_use(number) if number is not None else None


def _can_alias(param: Parameter) -> bool:
    """Whether the partition on this rank is the whole parameter, where and as it is computed with."""
    shard = param.ds_tensor
    return bool(
        param.ds_zero_partition_world_size == 1
        and shard.final_location != OffloadDeviceEnum.nvme
        and param.ds_secondary_tensor is None
        and not hasattr(shard, "ds_quant_scale")
        and shard.dtype == param.dtype
        and shard.device.type == torch.device(get_accelerator().current_device_name()).type
    )


def _gather_stream(overlap_comm: bool) -> Any:
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    return accelerator.Stream() if overlap_comm else accelerator.default_stream()
