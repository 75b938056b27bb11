"""Saving and loading: ``save_checkpoint``, ``load_checkpoint`` and ``from_pretrained``, their time and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, Rank
from benchmarks.figure import Figure
from benchmarks.peak_memory import HighWaterMark, in_fresh_process

LAYERS = 6
HIDDEN = 768
VOCABULARY = 4096


@dataclass(frozen=True)
class Cost:
    took_s: float
    peak_model_sizes: float
    """Resident memory above what was there before, in sizes of the whole model."""


def measure(rank: Rank) -> list[Figure]:
    """In fresh processes: the past of one does not count."""
    costs = {"save_checkpoint": Cost(0, 0), "load_checkpoint": Cost(0, 0)}
    layers = rank.choose(full=LAYERS, quick=2)
    costs["save_checkpoint"], costs["load_checkpoint"] = in_fresh_process(_save_and_load, layers, rank.scratch_dir)
    for name in ("llama", "mixtral"):
        folder = rank.scratch_dir / name
        costs[f"from_pretrained, {name}"] = in_fresh_process(_from_pretrained, name, layers, folder)
    figures = []
    for name, cost in costs.items():
        figures += [
            Figure(f"{name}: time", cost.took_s, "s"),
            Figure(f"{name}: peak memory of a rank", cost.peak_model_sizes, "× model"),
        ]
    return figures


def _save_and_load(layers: int, folder: Path) -> tuple[Cost, Cost]:
    """A model that has made a step, so that the optimizer has all of its state."""
    import torch

    from benchmarks import workload

    config = workload.zero3_config(learning_rate=1e-4)
    with workload.process_group():
        engine = workload.zero3_engine(workload.build(workload.llama(layers, HIDDEN, VOCABULARY)).train(), config)
        model_bytes = sum(p.ds_numel * p.element_size() for p in engine.module.parameters())
        tokens = torch.arange(16)[None]

        def step() -> torch.Tensor:
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            value: torch.Tensor = loss.detach()
            return value

        step()
        saved = _cost(lambda: engine.save_checkpoint(str(folder / "checkpoint")), model_bytes)
        expected = step()
        step()
        loaded = _cost(lambda: engine.load_checkpoint(str(folder / "checkpoint")), model_bytes)
        workload.require_close("loss of the step after loading", expected, step())
    return saved, loaded


def _from_pretrained(name: str, layers: int, folder: Path) -> Cost:
    """Each model is written by rank 0 first."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from benchmarks import workload

    config = workload.zero3_config()
    config_of = workload.llama if name == "llama" else workload.mixtral
    sizes = config_of(layers, HIDDEN // 2, vocabulary=VOCABULARY)
    with workload.process_group():
        if torch.distributed.get_rank() == 0:
            workload.build(sizes).save_pretrained(folder, max_shard_size="50MB")
        gc.collect()
        torch.distributed.barrier()
        alive = HfDeepSpeedConfig(config)  # makes from_pretrained partition, as long as it lives
        models: list[torch.nn.Module] = []
        model_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        cost = _cost(
            lambda: models.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), model_bytes
        )
    del alive
    return cost


def _cost(action: Callable[[], object], model_bytes: int) -> Cost:
    gc.collect()
    memory = HighWaterMark()
    began_s = time.perf_counter()
    action()
    took_s = time.perf_counter() - began_s
    return Cost(took_s, memory.take_bytes() / model_bytes)


CASE = Case(
    title=f"saving and loading (Llama and Mixtral, {LAYERS} layers, hidden {HIDDEN} and {HIDDEN // 2}, fp32)",
    measure=measure,
    time_limit_s=600.0,
)
