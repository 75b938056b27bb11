"""From a checkpoint to the first token when the weights stay on disk: loading, which writes them there, and a forward.

Each does it in a fresh process, after the system's copies of the checkpoint were dropped: it comes from the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import disk
from benchmarks.case import Case, Rank
from benchmarks.figure import Better, Figure
from benchmarks.peak_memory import in_fresh_process

LAYERS = 8
HIDDEN = 1536
VOCABULARY = 4096
PROMPT = list(range(1, 17))


@dataclass(frozen=True)
class FirstToken:
    """What one process found."""

    took_s: float
    logits: list[float]
    """Of the token behind the prompt."""


def measure(rank: Rank) -> list[Figure]:
    """Medians of rounds in which ZeRO-3 and accelerate take turns; both are compared with plain torch."""
    checkpoint = rank.scratch_dir / "checkpoint"
    expected = in_fresh_process(_plain, checkpoint, rank.choose(full=LAYERS, quick=2))
    took_s: dict[str, list[float]] = {"ZeRO-3": [], "accelerate": []}
    systems: dict[str, Callable[[Path, Path], FirstToken]] = {"ZeRO-3": _zero3, "accelerate": _accelerate}
    for round_number in range(rank.choose(full=3, quick=1)):
        for name, system in systems.items():
            disk.forget(checkpoint)
            first = in_fresh_process(system, checkpoint, rank.scratch_dir / f"{name}{round_number}")
            difference = max(abs(a - b) for a, b in zip(expected.logits, first.logits, strict=True))
            if not difference <= 1e-3:
                raise RuntimeError(f"{name} differs from plain torch by {difference:.3g} in the logits")
            took_s[name].append(first.took_s)
    zero3_s, accelerate_s = (sorted(values)[len(values) // 2] for values in took_s.values())
    return [
        Figure("from_pretrained to the first token, ZeRO-3, NVMe", zero3_s, "s"),
        Figure("from_pretrained to the first token, accelerate's disk offload", accelerate_s, "s"),
        Figure("time, accelerate's disk offload / ZeRO-3", accelerate_s / zero3_s, "×", Better.HIGHER),
    ]


def _plain(checkpoint: Path, layers: int) -> FirstToken:
    """Writes the checkpoint, too."""
    from benchmarks import workload

    model = workload.build(workload.llama(layers, HIDDEN, VOCABULARY)).eval()
    model.save_pretrained(checkpoint)
    return _first_token(model, time.perf_counter())


def _zero3(checkpoint: Path, folder: Path) -> FirstToken:
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from transformers.integrations import HfDeepSpeedConfig

    from benchmarks import workload

    config = workload.zero3_config()
    config["zero_optimization"]["offload_param"] = {
        "device": "nvme",
        "nvme_path": str(folder),
        "pin_memory": True,
        "buffer_count": 16,
        "buffer_size": HIDDEN * HIDDEN * 11 // 4 + 4096,  # the largest matrix, whole blocks of it
        "max_in_cpu": 0,
    }
    folder.mkdir()
    alive = HfDeepSpeedConfig(config)  # makes from_pretrained partition, as long as it lives
    with workload.process_group():
        AsyncIOBuilder().load()
        began_s = time.perf_counter()
        engine = workload.zero3_engine(workload.load(checkpoint).eval(), config)
        first = _first_token(engine.module, began_s)
        engine.destroy()
    del alive
    return first


def _accelerate(checkpoint: Path, folder: Path) -> FirstToken:
    import torch
    from transformers import LlamaForCausalLM

    began_s = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, device_map={"": "disk"}, offload_folder=str(folder)
    )
    return _first_token(model.eval(), began_s)


def _first_token(model: object, began_s: float) -> FirstToken:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]), use_cache=False).logits  # type: ignore[operator]
    return FirstToken(time.perf_counter() - began_s, logits[0, -1].tolist())


CASE = Case(
    title=f"first token from NVMe (Llama, {LAYERS} layers, hidden {HIDDEN}, fp32)",
    measure=measure,
    world_sizes=(1,),
    time_limit_s=900.0,
)
