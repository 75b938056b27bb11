"""The builder of pinned memory: the fork's for CPU and CUDA, DeepSpeed's where another op links against it.

GDS, and the I/O ops that other accelerators still build from DeepSpeed's sources, look for a manager of pinned tensors
in the process, which only DeepSpeed's own op brings along. That includes all of torch and takes minutes to compile.
"""

import sys

from .builder import OpBuilder
from .native import NativeLibrary
from .native_op import NativeOp
from .pin_memory_load import load_pin_memory_module

PAGES = NativeLibrary(
    name="pin_memory",
    module="deepspeed.ops.pin_memory.pin_memory_op",
    sources=("csrc/pin_memory/pages.cpp",),
    headers=("csrc/pin_memory/pages.h",),
)
_OWN_ACCELERATORS = ("cpu", "cuda")


class PinnedTensorManager(OpBuilder):
    """DeepSpeed's op. Not a name in ...Builder: those are collected as ops to be offered."""

    def __init__(self, name):
        super().__init__(name=name)

    def absolute_name(self):
        return PAGES.module

    def sources(self):
        return [f"csrc/pin_memory/{name}.cpp" for name in ("page_alloc", "deepspeed_pin_tensor", "py_ds_pin_memory")]

    def include_paths(self):
        return ["csrc/pin_memory"]

    def load(self, verbose=False):
        return load_pin_memory_module(self, verbose=verbose)


class PinMemoryBuilder(NativeOp):
    """DeepSpeed's name for it; `ds_report` and `setup.py` find it by that."""

    NAME = PAGES.name
    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    LIBRARY = PAGES

    def wrap(self, path):
        from deepspeed.ops.aio.library import PagesLibrary
        from deepspeed.ops.aio.pin_handle import PinMemoryOp

        return PinMemoryOp(PagesLibrary(path))

    def sources(self):
        return super().sources() if _is_own() else PinnedTensorManager(self.NAME).sources()

    def include_paths(self):
        return [] if _is_own() else PinnedTensorManager(self.NAME).include_paths()

    def is_compatible(self, verbose=False):
        return super().is_compatible(verbose) if _is_own() else sys.platform != "win32"

    def builder(self):
        return super().builder() if _is_own() else PinnedTensorManager(self.NAME).builder()

    def load(self, verbose=False):
        return super().load(verbose) if _is_own() else PinnedTensorManager(self.NAME).load(verbose)


def _is_own():
    try:
        from accelerator import get_accelerator  # while the package is being built
    except ImportError:
        from deepspeed.accelerator import get_accelerator
    return get_accelerator()._name in _OWN_ACCELERATORS
