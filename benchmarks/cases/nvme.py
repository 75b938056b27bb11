"""A forward without grad through a model that is on disk: how much of the disk's speed is left, and what is read again.

A stack of linear layers and one row of input, so that nothing but reading takes time. fio, ZeRO-3 and accelerate's disk
offload take turns on one file system; accelerate maps files, so the system's copies of them are dropped before each of
its forwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import disk
from benchmarks.case import Case, Rank
from benchmarks.figure import Aim, Better, Figure

WIDTH = 2048
LAYERS = 120
BUFFERS = 24
"""For the base, which pins that many matrices: fewer make it slower."""
FORWARDS = 3
"""In a round. The best of them counts, as the best of fio's runs does: the disk's speed drifts by the second."""
TIMES_FIO = "× fio"


def measure(rank: Rank) -> list[Figure]:
    """Medians of rounds, in each of which fio comes first; each system's output is compared with plain torch."""
    import torch

    from benchmarks import workload

    layers = rank.choose(full=LAYERS, quick=8)
    rounds = rank.choose(full=3, quick=1)
    fio_file = rank.scratch_dir / "fio"
    file_bytes = rank.choose(full=1 << 30, quick=1 << 26)
    with workload.process_group(), torch.no_grad():
        x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(workload.SEED))
        expected = _plain_output(x, layers)
        model_bytes = layers * WIDTH * WIDTH * x.element_size()

        locked_before_bytes = disk.locked_bytes()
        engine = _engine(rank.scratch_dir / "nvme", layers, max_in_cpu=0)
        workload.require_close("output", expected, engine(x))
        offloaded, files = _accelerate(rank.scratch_dir / "accelerate", layers)
        workload.require_close("output of accelerate", expected, offloaded(x))

        fio_rates, engine_rates, accelerate_rates = [], [], []
        for _ in range(rounds):
            fio_rates.append(disk.best_read_rate(fio_file, file_bytes))
            engine_rates.append(max(_rate(partial(engine, x), model_bytes) for _ in range(FORWARDS)))
            disk.forget(files)
            accelerate_rates.append(_rate(partial(offloaded, x), model_bytes))
        locked_bytes = disk.locked_bytes() - locked_before_bytes
        engine.destroy()
        del engine, offloaded

        cached = _engine(rank.scratch_dir / "cached", layers, max_in_cpu=layers * WIDTH * WIDTH // 2)
        shares = []
        for _ in range(3 + rounds):  # the first ones show what comes when, and fill the cache
            before_bytes = disk.bytes_read()
            workload.require_close("output with max_in_cpu", expected, cached(x))
            shares.append((disk.bytes_read() - before_bytes) / model_bytes)
        cached.destroy()

    engine_ratio, accelerate_ratio = (
        statistics.median(rate / fio_rate for rate, fio_rate in zip(rates, fio_rates))
        for rates in (engine_rates, accelerate_rates)
    )
    return [
        Figure("ZeRO-3, NVMe / fio's best", engine_ratio, TIMES_FIO, Better.HIGHER, Aim(0.95)),
        Figure("accelerate's disk offload / fio's best", accelerate_ratio, TIMES_FIO, Better.HIGHER),
        Figure("ZeRO-3, NVMe", statistics.median(engine_rates), "GB/s", Better.HIGHER),
        Figure("fio's best", statistics.median(fio_rates), "GB/s", Better.HIGHER),
        Figure("pinned memory", locked_bytes / 2**20, "MiB", aim=Aim(64)),
        Figure("read with max_in_cpu at half of the model", statistics.median(shares[3:]), "× model", aim=Aim(0.55)),
    ]


def _rate(forward: Callable[[], object], n_bytes: int) -> float:
    began_s = time.perf_counter()
    forward()
    return n_bytes / (time.perf_counter() - began_s) / disk.GB


def _weight(layer: int) -> Any:
    """``(WIDTH, WIDTH)``; products of many keep the size of what they are applied to."""
    import torch

    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(layer)).div_(WIDTH**0.5)


def _plain_output(x: Any, layers: int) -> Any:
    for layer in range(layers):
        x = x @ _weight(layer).t()
    return x


def _stack(layers: int) -> Any:
    """Linear layers with the weights of `_weight`, given to them one by one as they are made."""
    import torch

    class Layer(torch.nn.Linear):
        def __init__(self, layer: int) -> None:
            self.layer = layer
            super().__init__(WIDTH, WIDTH, bias=False)

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.copy_(_weight(self.layer))

    return torch.nn.Sequential(*(Layer(layer) for layer in range(layers)))


def _engine(folder: Path, layers: int, max_in_cpu: int) -> Any:
    """The stack, built under `zero.Init` to files below ``folder``."""
    import deepspeed

    from benchmarks import workload

    folder.mkdir()
    config = workload.zero3_config()
    config["zero_optimization"]["offload_param"] = {
        "device": "nvme",
        "nvme_path": str(folder),
        "pin_memory": True,
        "buffer_count": BUFFERS,
        "buffer_size": WIDTH * WIDTH,
        "max_in_cpu": max_in_cpu,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = _stack(layers)
    return workload.zero3_engine(model.eval(), config)


def _accelerate(folder: Path, layers: int) -> tuple[Any, Path]:
    """The stack under accelerate's disk offload, and where its files are."""
    import accelerate
    import torch

    model = _stack(layers).eval()
    accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return model, folder


CASE = Case(
    title=f"forward from NVMe ({LAYERS} matrices of 16 MiB, one row, no grad)",
    measure=measure,
    world_sizes=(1,),
    time_limit_s=900.0,
)
