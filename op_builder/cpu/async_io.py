"""The I/O op is the same whatever the accelerator."""

try:
    from op_builder import __deepspeed__  # noqa: F401  # while the package is being built
    from op_builder.async_io import AsyncIOBuilder
except ImportError:
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
