"""Reading parts of the tensors in a safetensors file: only the bytes of the part, straight into where it belongs.

The format: 8 bytes of little-endian header length, a JSON header with dtype, shape and byte offsets of each tensor,
and the tensors' bytes (https://huggingface.co/docs/safetensors). The library that comes with it maps whole files, and
the pages of other ranks' parts that it touches count as memory of the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .split import Span

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
_LEAST_RUN_BYTES = 512
"""Shorter runs are not worth a call each: the whole stretch is read, and what is wanted picked out."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``offset`` bytes from the beginning of the file."""

    file: SafetensorsFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """One file. ``tensors`` by name; ``bytes_read`` counts what was read of them.

    Raises OSError if the file cannot be read or is shorter than its header says, ValueError if the header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_header(self) -> dict[str, StoredTensor]:
        file_bytes = os.fstat(self._descriptor).st_size
        header_bytes = int.from_bytes(os.pread(self._descriptor, _LENGTH_BYTES, 0), "little")
        if not 0 < header_bytes <= min(file_bytes - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise ValueError(
                f"{self.path}: expected a safetensors header, got a length of {header_bytes} bytes in a file of"
                f" {file_bytes}"
            )
        try:
            header = json.loads(os.pread(self._descriptor, header_bytes, _LENGTH_BYTES))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            return {name: self._entry(name, entry, header_bytes, file_bytes) for name, entry in entries.items()}
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}: damaged safetensors header: {error!r}") from error

    def _entry(self, name: str, entry: dict[str, Any], header_bytes: int, file_bytes: int) -> StoredTensor:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        start = _LENGTH_BYTES + header_bytes
        wanted = torch.Size(shape).numel() * dtype.itemsize
        if end - begin != wanted:
            raise ValueError(f"{self.path}: {name}: expected {wanted} bytes for {shape} {dtype}, got {end - begin}")
        if start + end > file_bytes:
            raise OSError(
                f"{self.path}: {name}: expected {wanted} bytes at offset {start + begin}, but the file ends at"
                f" {file_bytes}: it is truncated"
            )
        return StoredTensor(self, name, dtype, shape, start + begin)

    def read(self, tensor: StoredTensor, region: Sequence[Span]) -> torch.Tensor:
        """The part of ``tensor`` in ``region``, which has a span for each dimension."""
        part = torch.empty([stop - start for start, stop in region], dtype=tensor.dtype)
        if part.numel():
            # From the last dimension that is cut on, a part is one run of bytes.
            cut = max((dim for dim, span in enumerate(region) if span != (0, tensor.shape[dim])), default=-1)
            self._read_into(tensor, region, cut, part, 0)
        return part

    def _read_into(
        self, tensor: StoredTensor, region: Sequence[Span], cut: int, part: torch.Tensor, origin: int
    ) -> None:
        """``part`` has the dimensions that are left of ``region``; ``origin`` counts elements before them."""
        done = len(tensor.shape) - part.dim()
        item = tensor.dtype.itemsize
        if done > cut or not region[done:]:
            self._fill(part, tensor, origin * item)
            return
        start, stop = region[done]
        inner = torch.Size(tensor.shape[done + 1 :]).numel()
        if done == cut:
            self._fill(part, tensor, (origin + start * inner) * item)
            return
        run = torch.Size([last - first for first, last in region[cut:]]).numel() * item
        if done == cut - 1 and run < _LEAST_RUN_BYTES:
            stretch = torch.empty((stop - start, *tensor.shape[done + 1 :]), dtype=tensor.dtype)
            self._fill(stretch, tensor, (origin + start * inner) * item)
            first, last = region[cut]
            part.copy_(stretch.narrow(1, first, last - first))
            return
        for index in range(start, stop):
            self._read_into(tensor, region, cut, part[index - start], origin + index * inner)

    def _fill(self, part: torch.Tensor, tensor: StoredTensor, offset: int) -> None:
        buffer = memoryview(part.view(-1).view(torch.uint8).numpy())
        done = 0
        while done < len(buffer):
            got = os.preadv(self._descriptor, [buffer[done:]], tensor.offset + offset + done)
            if got == 0:
                raise OSError(
                    f"{self.path}: {tensor.name}: expected {len(buffer)} bytes at offset {tensor.offset + offset}, got"
                    f" {done}: the file has been cut short"
                )
            done += got
        self.bytes_read += done
