"""The state of a rank that outlives a test unless it is put back: engines, module globals, process groups, seeds,
hooks.

``RankState.capture()`` remembers it once, when the rank is new; ``restore()`` returns to it after every test.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

SEED = 0
RESTORED_PACKAGES = ("deepspeed",)
RESTORED_MODULES = (
    "torch",
    "torch.nn.functional",
    "torch.nn.init",
    "transformers.integrations.deepspeed",
    "accelerate.state",
)
"""Modules outside the restored packages whose functions ``zero.Init`` and friends replace, or that keep globals for
them."""

_PATCHED_CLASSES: tuple[type, ...] = (torch.nn.Module, torch.Tensor, torch.nn.Linear, torch.nn.Embedding)
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CONTAINER_TYPES = (list, dict, set, OrderedDict)
_GLOBAL_HOOK_DICTS = tuple(
    name
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
_RESOURCE_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)


@dataclass
class NamespaceState:
    """The names of a module or class and, for containers, their contents."""

    owner: types.ModuleType | type
    values: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def capture(cls, owner: types.ModuleType | type, *, functions: bool = False) -> NamespaceState:
        """Remember ``owner``'s plain values and containers; with ``functions``, everything else as well."""
        values = {
            name: value
            for name, value in vars(owner).items()
            if not name.startswith("__") and (functions or _is_mutable_state(value))
        }
        return cls(owner, values, {n: v.copy() for n, v in values.items() if type(v) in _CONTAINER_TYPES})

    def restore(self) -> None:
        current = vars(self.owner)
        for name, value in self.values.items():
            if current.get(name, self) is not value:
                setattr(self.owner, name, value)
            content = self.contents.get(name)
            if content is not None and not _same_items(value, content):
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
        # A plain value that was not there before is state too: a flag that a test or a lazy initialisation set.
        for name in [n for n, v in current.items() if n not in self.values and type(v) in _PLAIN_TYPES]:
            if not name.startswith("__"):
                delattr(self.owner, name)


def _is_mutable_state(value: object) -> bool:
    return type(value) in _PLAIN_TYPES or type(value) in _CONTAINER_TYPES or type(value).__module__ != "builtins"


def _same_items(value: Any, content: Any) -> bool:
    """Same objects in the same places. Does not compare values: those may be tensors."""
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return all(k in content and content[k] is v for k, v in value.items())
    if isinstance(value, set):
        return bool(value == content)
    return all(a is b for a, b in zip(value, content, strict=True))


def _namespaces() -> list[NamespaceState]:
    states = []
    for name, module in list(sys.modules.items()):
        if name in RESTORED_MODULES:
            states.append(NamespaceState.capture(module, functions=name != "torch.nn.init"))
        elif name.partition(".")[0] in RESTORED_PACKAGES and isinstance(module, types.ModuleType):
            states.append(NamespaceState.capture(module))
            classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
            states += [NamespaceState.capture(c) for c in classes if not _is_enum_or_model(c)]
    return states


def _caches() -> list[Callable[[], None]]:
    """``cache_clear`` of every memoised function: on a method, a cache keeps each object it was called for alive."""
    owners: list[object] = [m for n, m in sys.modules.items() if n.partition(".")[0] in RESTORED_PACKAGES]
    owners += [v for module in list(owners) for v in vars(module).values() if isinstance(v, type)]
    found: dict[int, Callable[[], None]] = {}
    for owner in owners:
        for value in vars(owner).values():
            found.update({id(f): f.cache_clear for f in _decorated(value) if hasattr(f, "cache_clear")})
    return list(found.values())


def _decorated(value: object) -> Iterator[Any]:
    """The callable and, if it is a decorator's wrapper, those that it wraps."""
    while callable(value):
        yield value
        cells = getattr(value, "__closure__", None) or ()
        inner = [c.cell_contents for c in cells if not _is_empty(c) and callable(c.cell_contents)]
        value = inner[0] if len(inner) == 1 else None


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _is_enum_or_model(cls: type) -> bool:
    """Enums and pydantic models keep machinery, not state, in their class namespace."""
    return any(base.__module__.partition(".")[0] in ("enum", "pydantic") for base in cls.__mro__)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass
class RankState:
    namespaces: list[NamespaceState]
    class_functions: list[tuple[type, dict[str, Any]]]
    caches: list[Callable[[], None]]
    global_hooks: dict[str, dict[Any, Any]]
    process_groups: frozenset[Any]
    environment: dict[str, str]
    sys_path: list[str]
    work_dir: str
    log_levels: dict[str, int]
    log_handlers: dict[str, list[logging.Handler]]
    resource_limits: dict[int, tuple[int, int]]
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    num_threads: int = field(default_factory=torch.get_num_threads)

    @classmethod
    def capture(cls) -> RankState:
        loggers = {n: lg for n, lg in logging.root.manager.loggerDict.items() if isinstance(lg, logging.Logger)}
        return cls(
            namespaces=_namespaces(),
            class_functions=[(c, dict(vars(c))) for c in _PATCHED_CLASSES],
            caches=_caches(),
            global_hooks={name: dict(getattr(torch.nn.modules.module, name)) for name in _GLOBAL_HOOK_DICTS},
            process_groups=frozenset(torch.distributed.distributed_c10d._world.pg_map),
            environment=dict(os.environ),
            sys_path=list(sys.path),
            work_dir=str(Path.cwd()),
            log_levels={n: lg.level for n, lg in loggers.items()},
            log_handlers={n: list(lg.handlers) for n, lg in loggers.items()},
            resource_limits={limit: resource.getrlimit(limit) for limit in _RESOURCE_LIMITS},
        )

    def restore(self) -> int:
        """Put everything back and return the number of engines that were destroyed."""
        self._restore_process()
        destroyed = destroy_engines()
        self._restore_torch()
        self._restore_frameworks()
        self._destroy_new_process_groups()
        gc.collect()
        return destroyed

    def _restore_process(self) -> None:
        for limit, (soft, hard) in self.resource_limits.items():
            with contextlib.suppress(ValueError, OSError):  # a lowered hard limit cannot be raised again without root
                resource.setrlimit(limit, (soft, hard))
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.sys_path
        os.chdir(self.work_dir)
        for name, level in self.log_levels.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.handlers[:] = self.log_handlers[name]

    def _restore_torch(self) -> None:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_num_threads(self.num_threads)
        for name, hooks in self.global_hooks.items():
            current = getattr(torch.nn.modules.module, name)
            current.clear()
            current.update(hooks)
        seed_everything(SEED)

    def _restore_frameworks(self) -> None:
        from deepspeed.runtime.zero import partition_parameters

        if partition_parameters.zero_init_context:
            partition_parameters.shutdown_init_context()
        for cls, functions in self.class_functions:
            for name, function in functions.items():
                if vars(cls).get(name) is not function and not name.startswith("__dict"):
                    setattr(cls, name, function)
        for namespace in self.namespaces:
            namespace.restore()
        for clear in self.caches:
            clear()
        gc.enable()

    def _destroy_new_process_groups(self) -> None:
        world = torch.distributed.distributed_c10d._world
        for group in [g for g in world.pg_map if g not in self.process_groups]:
            torch.distributed.destroy_process_group(group)


def destroy_engines() -> int:
    """Call ``destroy`` of every engine that is still alive: it removes hooks and returns pinned buffers."""
    from deepspeed import DeepSpeedEngine

    # The collector lists only what was made since the fork: the template froze everything older.
    engines = [o for o in gc.get_objects() if isinstance(o, DeepSpeedEngine)]
    for engine in engines:
        engine.destroy()
    return len(engines)


def residue() -> tuple[str, ...]:
    """What a test left running that this process cannot take back: threads, child processes, listening ports."""
    process = psutil.Process()
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    children = [c for c in process.children(recursive=True) if not _is_resource_tracker(c)]
    return (
        *(f"thread {name!r} is still running" for name in threads),
        *(f"child process {child.pid} ({child.name()}) is still running" for child in children),
    )


def listening_ports() -> frozenset[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return frozenset(c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN)


def _is_resource_tracker(process: psutil.Process) -> bool:
    """``multiprocessing`` starts one for each process that uses shared memory; it ends with that process."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
