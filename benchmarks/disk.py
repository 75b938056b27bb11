"""What the disk itself can do, against which reading and writing files is measured: fio, past the page cache.

fio's own memory is small pages, into which some virtual disks read at half the speed; glibc gives it huge ones if it is
told to. Of all ways in which it is asked the best counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 1 << 20
GB = 1e9


@dataclass(frozen=True)
class Load:
    """How fio is asked: processes, blocks that each has under way, and the memory that they go to."""

    jobs: int
    depth: int
    huge_pages: bool


READS = tuple(Load(*shape, huge_pages) for shape in ((1, 8), (1, 32), (4, 8)) for huge_pages in (False, True))
WRITES = tuple(Load(1, depth, huge_pages=True) for depth in (8, 32))


def best_read_rate(path: Path, n_bytes: int) -> float:
    """GB/s of a sequential read of a file of ``n_bytes`` at ``path``, which is made if it is not there."""
    return max(_run(path, n_bytes, "read", load) for load in READS)


def best_write_rate(path: Path, n_bytes: int) -> float:
    """GB/s of a sequential write of a file that was not there before."""
    rates = []
    for load in WRITES:
        path.unlink(missing_ok=True)
        rates.append(_run(path, n_bytes, "write", load))
        os.sync()
    return max(rates)


def forget(folder: Path) -> None:
    """Have the system drop its copies of the files below ``folder``, so that the next read is from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def bytes_read() -> int:
    """What this process has read from disks so far."""
    return _field(Path("/proc/self/io"), "read_bytes")


def locked_bytes() -> int:
    """Memory of this process that is locked: pinned, in the words of DeepSpeed."""
    return _field(Path("/proc/self/status"), "VmLck") * 1024


def _run(path: Path, n_bytes: int, way: str, load: Load) -> float:
    """GB/s. Raises `RuntimeError` where fio is not installed."""
    if shutil.which("fio") is None:
        raise RuntimeError("fio is not installed (Debian: apt install fio), and there is nothing else to compare with")
    part_bytes = n_bytes // load.jobs
    options = {
        "name": way,
        "filename": path,
        "rw": way,
        "bs": BLOCK_BYTES,
        "size": part_bytes,
        "offset_increment": part_bytes,
        "numjobs": load.jobs,
        "iodepth": load.depth,
        "direct": 1,
        "ioengine": "io_uring",
        "mem": "malloc",
        "iomem_align": "2m",
        "output-format": "json",
    }
    command = ["fio", "--thread", "--group_reporting", *(f"--{name}={value}" for name, value in options.items())]
    variables = os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb={int(load.huge_pages)}"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout
    # Remarks of fio may precede the report.
    return float(json.loads(printed[printed.index("{") :])["jobs"][0][way]["bw_bytes"]) / GB


def _field(path: Path, name: str) -> int:
    """The number behind ``name:`` in a file of /proc."""
    for line in path.read_text().splitlines():
        found, _, rest = line.partition(":")
        if found == name:
            return int(rest.split()[0])
    raise RuntimeError(f"{path} has no {name}; this is measured on Linux only")
