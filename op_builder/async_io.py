"""The builder of the I/O op: the fork's engine, which needs neither libaio nor another op."""

from .native import NativeLibrary
from .native_op import NativeOp

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


class AsyncIOBuilder(NativeOp):
    """DeepSpeed's name for it; `ds_report` and `setup.py` find it by that."""

    NAME = ASYNC_IO.name
    BUILD_VAR = "DS_BUILD_AIO"
    LIBRARY = ASYNC_IO

    def wrap(self, path):
        from deepspeed.ops.aio.handle import AsyncIOOp
        from deepspeed.ops.aio.library import AioLibrary

        return AsyncIOOp(AioLibrary(path))
