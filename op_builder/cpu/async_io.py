"""The I/O op is the same whatever the accelerator."""

from ..async_io import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
