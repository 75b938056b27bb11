"""The builder of the I/O op: the fork's engine, which needs neither libaio nor another op."""

from .builder import OpBuilder
from .native import NativeLibrary

ASYNC_IO = NativeLibrary(
    name="async_io",
    module="deepspeed.ops.aio.async_io_op",
    sources=(
        "csrc/aio/engine/api.cpp",
        "csrc/aio/engine/engine.cpp",
        "csrc/aio/engine/file.cpp",
        "csrc/aio/engine/ring.cpp",
        "csrc/pin_memory/pages.cpp",
    ),
    headers=(
        "csrc/aio/engine/engine.h",
        "csrc/aio/engine/file.h",
        "csrc/aio/engine/ring.h",
        "csrc/aio/engine/system_error.h",
        "csrc/pin_memory/pages.h",
    ),
)


class AsyncIOBuilder(OpBuilder):
    """DeepSpeed's name for it; `ds_report` and `setup.py` find it by that."""

    NAME = ASYNC_IO.name
    BUILD_VAR = "DS_BUILD_AIO"

    def __init__(self):
        super().__init__(ASYNC_IO.name)

    def absolute_name(self):
        return ASYNC_IO.module

    def sources(self):
        return list(ASYNC_IO.sources)

    def is_compatible(self, verbose=False):
        if ASYNC_IO.is_available():
            return True
        if verbose:
            self.warning(f"{self.NAME} needs Linux, and a C++ compiler (g++, or one named in CXX) to be built with")
        return False

    def builder(self):
        return ASYNC_IO.extension()

    def load(self, verbose=False):
        """The op (deepspeed.ops.aio.handle.AsyncIOOp), compiled now if need be."""
        if self.name not in OpBuilder._loaded_ops:
            from deepspeed.ops.aio.handle import AsyncIOOp
            from deepspeed.ops.aio.library import AioLibrary

            OpBuilder._loaded_ops[self.name] = AsyncIOOp(AioLibrary(ASYNC_IO.path()))
        return OpBuilder._loaded_ops[self.name]
