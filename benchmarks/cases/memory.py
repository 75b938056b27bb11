"""Peak memory of a rank while it loads a checkpoint and while it runs the model, in units of the model's size.

Each way of running the model gets a fresh process, since the high-water mark of a process never falls by itself and an
allocator keeps what it once had. What counts is resident memory, the mapped pages of the checkpoint file included, and
of the memory that ranks share a rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, Rank
from benchmarks.figure import TIMES_PLAIN, Aim, Figure
from benchmarks.peak_memory import HighWaterMark, in_fresh_process

LAYERS = 8
HIDDEN = 1024
VOCABULARY = 4096
TOKENS = 16


LOGITS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Peaks:
    """The high-water marks of one process, above what it held after its imports."""

    loading_bytes: int
    forward_bytes: int
    model_bytes: int
    largest_parameter_bytes: int
    whole_share: float
    """Largest share of the model's elements that was whole on this rank when a module began its forward."""
    logits: list[float]
    """Of the last token."""

    @property
    def peak_bytes(self) -> int:
        return max(self.loading_bytes, self.forward_bytes)


def measure(rank: Rank) -> list[Figure]:
    """Compares a process with plain torch and a process of this rank's ZeRO-3 group."""
    checkpoint = rank.scratch_dir / f"checkpoint{rank.rank}"
    plain = in_fresh_process(_plain_peaks, checkpoint, rank.choose(full=LAYERS, quick=2))
    zero = in_fresh_process(_zero3_peaks, checkpoint)
    difference = max(abs(a - b) for a, b in zip(plain.logits, zero.logits, strict=True))
    if not difference <= LOGITS_TOLERANCE:
        raise RuntimeError(f"ZeRO-3 differs from plain torch by {difference:.3g} in the logits: nothing to measure")
    loading_aim = Aim(
        round(1.3 / rank.world_size + zero.largest_parameter_bytes / zero.model_bytes, 2),
        note="1.3 shares of the model and its largest parameter",
    )
    unit = "× model"
    return [
        Figure("ZeRO-3 / plain", zero.peak_bytes / plain.peak_bytes, TIMES_PLAIN),
        Figure("ZeRO-3, loading", zero.loading_bytes / zero.model_bytes, unit, aim=loading_aim),
        Figure("ZeRO-3, forward", zero.forward_bytes / zero.model_bytes, unit),
        Figure("ZeRO-3, parameters whole at once in the forward", zero.whole_share, unit),
        Figure("plain, loading", plain.loading_bytes / plain.model_bytes, unit),
        Figure("plain, forward", plain.forward_bytes / plain.model_bytes, unit),
    ]


def _plain_peaks(checkpoint: Path, layers: int) -> Peaks:
    """Writes the checkpoint, gives up the model that it came from, and then loads and runs it as anybody would."""
    import torch

    from benchmarks import workload

    workload.build(workload.llama(layers, HIDDEN, VOCABULARY)).save_pretrained(checkpoint)
    memory = HighWaterMark()
    model = workload.load(checkpoint).eval()
    loading_bytes = memory.take_bytes()
    with torch.no_grad():
        logits = model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=False).logits
    forward_bytes = memory.take_bytes()
    sizes_bytes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    return Peaks(loading_bytes, forward_bytes, sum(sizes_bytes), max(sizes_bytes), 1.0, logits[0, -1].tolist())


def _zero3_peaks(checkpoint: Path) -> Peaks:
    """Loads the checkpoint as a Trainer with a ds_config of stage 3 does, and runs it in this rank's group."""
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from benchmarks import workload

    ds_config = workload.zero3_config()
    alive = HfDeepSpeedConfig(ds_config)  # makes from_pretrained partition, as long as it lives
    memory = HighWaterMark()
    with workload.process_group():
        engine = workload.zero3_engine(workload.load(checkpoint).eval(), ds_config)
        loading_bytes = memory.take_bytes()

        parameters = list(engine.module.parameters())
        whole_numels: list[int] = []

        def count_whole(module: torch.nn.Module, inputs: object) -> None:
            # Views of partitions that ranks share are no memory of their own.
            whole = (p for p in parameters if p.ds_status.name == "AVAILABLE" and not getattr(p, "ds_resident", False))
            whole_numels.append(sum(p.ds_numel for p in whole))

        # Hooks of one module run in the order in which they came: these see what the engine's hooks have gathered.
        for module in engine.module.modules():
            module.register_forward_pre_hook(count_whole)
        with torch.no_grad():
            logits = engine(torch.ones(1, TOKENS, dtype=torch.long), use_cache=False).logits
        forward_bytes = memory.take_bytes()
    del alive
    sizes_bytes = [parameter.ds_numel * parameter.element_size() for parameter in parameters]
    whole_share = max(whole_numels) / sum(parameter.ds_numel for parameter in parameters)
    return Peaks(loading_bytes, forward_bytes, sum(sizes_bytes), max(sizes_bytes), whole_share, logits[0, -1].tolist())


CASE = Case(title=f"peak memory (Llama, {LAYERS} layers, hidden {HIDDEN}, fp32, no grad)", measure=measure)
