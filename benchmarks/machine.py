"""What machine this is, as far as it bears on the figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> dict[str, str]:
    """The facts in the order in which they are shown; the load is that of the moment, before the first run."""
    cores = len(os.sched_getaffinity(0))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(cores),
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load before the first run": f"{os.getloadavg()[0]:.1f} on {cores} cores",
    }


def _processor() -> str:
    """The model name that the kernel tells; `platform.processor()` is empty on Debian."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
