"""Tensor-parallel inference of a MoE that lies in a folder: what a rank holds and reads, and how fast it generates.

The fork is given the folder, and loads in slices. The base is given the model that from_pretrained makes of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Rank
from benchmarks.figure import TIMES_PLAIN, Aim, Better, Figure
from benchmarks.peak_memory import HighWaterMark, in_fresh_process
from benchmarks.timing import interleaved_medians_s

LAYERS = 6
HIDDEN = 512
VOCABULARY = 4096
PROMPT_TOKENS = 16
NEW_TOKENS = 8
LOGITS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Divided:
    """What one rank measured, with a model of ``model_numel`` fp32 parameters."""

    model_numel: int
    held_numel: int
    read_bytes: int
    loading_s: float
    peak_bytes: int
    generate_s: float
    plain_s: float


def measure(rank: Rank) -> list[Figure]:
    """Divides the model in a fresh process of each rank, and compares logits with those of the whole model."""
    checkpoint = rank.scratch_dir / f"checkpoint{rank.rank}"
    in_fresh_process(_save, checkpoint, rank.choose(full=LAYERS, quick=2))
    divided = in_fresh_process(_divide, checkpoint, rank.world_size, rank.choose(full=5, quick=1))
    model_bytes = 4 * divided.model_numel
    share = Aim(round(1.1 / rank.world_size, 2), note="1.1 shares")
    unit = "× model"
    return [
        Figure("generate / plain", divided.generate_s / divided.plain_s, TIMES_PLAIN),
        Figure("tokens/s", NEW_TOKENS / divided.generate_s, "tokens/s", Better.HIGHER),
        Figure("tokens/s, plain", NEW_TOKENS / divided.plain_s, "tokens/s", Better.HIGHER),
        Figure("parameters of a rank", divided.held_numel / divided.model_numel, unit, aim=share),
        Figure("peak memory, loading and dividing", divided.peak_bytes / model_bytes, unit),
        Figure("read of the checkpoint", divided.read_bytes / model_bytes, unit),
        Figure("time to load and divide", divided.loading_s, "s"),
    ]


def _save(checkpoint: Path, layers: int) -> None:
    from benchmarks import workload

    workload.build(workload.mixtral(layers, HIDDEN, vocabulary=VOCABULARY)).save_pretrained(checkpoint)


def _divide(checkpoint: Path, ranks: int, samples: int) -> Divided:
    import deepspeed
    import torch
    from transformers import MixtralForCausalLM

    from benchmarks import workload

    def engine_of(model: Any) -> Any:
        return deepspeed.init_inference(model, tensor_parallel={"tp_size": ranks}, dtype=torch.float32)

    def load() -> Any:
        return MixtralForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    with workload.process_group():
        # What is imported at first use is not the model's.
        engine_of(workload.build(workload.mixtral(1, 64)))
        memory = HighWaterMark()
        begin_s = time.perf_counter()
        # from_pretrained reads all of the checkpoint.
        engine = engine_of(str(checkpoint) if hasattr(deepspeed, "fork_info") else load())
        loading_s = time.perf_counter() - begin_s
        peak_bytes = memory.take_bytes()
        plain = load()
        model_numel = sum(parameter.numel() for parameter in plain.parameters())
        loaded = getattr(engine, "loaded", None)

        prompt = torch.randint(
            1, VOCABULARY, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(workload.SEED)
        )
        with torch.no_grad():
            difference = (engine(prompt).logits - plain(prompt).logits).abs().max().item()
        if not difference <= LOGITS_TOLERANCE:
            raise RuntimeError(f"logits differ from the whole model's by {difference:.3g}: nothing to measure")
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        medians_s = interleaved_medians_s(
            {
                "plain": lambda: plain.generate(input_ids=prompt, **options),
                "divided": lambda: engine.generate(input_ids=prompt, **options),
            },
            samples=samples,
            warm_ups=1,
            line_up=torch.distributed.barrier,
        )
    return Divided(
        model_numel=model_numel,
        held_numel=sum(parameter.numel() for parameter in engine.module.parameters()),
        read_bytes=loaded.bytes_read if loaded is not None else 4 * model_numel,
        loading_s=loading_s,
        peak_bytes=peak_bytes,
        generate_s=medians_s["divided"],
        plain_s=medians_s["plain"],
    )


CASE = Case(
    title=f"tensor-parallel inference (Mixtral, {LAYERS} layers, hidden {HIDDEN}, 4 experts, fp32)",
    measure=measure,
    world_sizes=(2,),
)
