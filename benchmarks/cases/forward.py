"""The forward of a deep and narrow model for one token: all of it is overhead, nearly none of it arithmetic."""

from __future__ import annotations

from benchmarks.case import Case, Rank
from benchmarks.figure import TIMES_PLAIN, Aim, Figure
from benchmarks.timing import interleaved_medians_s

LAYERS = 24
HIDDEN = 128
AIMS = {1: Aim(1.1), 2: Aim(3.0, note="≤ 1.15 with shards that the ranks of a node share")}


def measure(rank: Rank) -> list[Figure]:
    """Times the forward without grad of the same model with and without ZeRO-3."""
    import torch

    from benchmarks import workload

    config = workload.llama(LAYERS, HIDDEN)
    token = torch.tensor([[7]])
    with workload.process_group(), torch.no_grad():
        plain = workload.build(config).eval()
        engine = workload.zero3_engine(workload.build(config).eval(), workload.zero3_config())
        workload.require_close("logits", plain(token, use_cache=False).logits, engine(token, use_cache=False).logits)
        medians_s = interleaved_medians_s(
            {"plain": lambda: plain(token, use_cache=False), "zero": lambda: engine(token, use_cache=False)},
            samples=rank.choose(full=60, quick=10),
            warm_ups=rank.choose(full=10, quick=3),
            line_up=torch.distributed.barrier,
        )
    module_count = sum(1 for _ in plain.modules())
    overhead_s = medians_s["zero"] - medians_s["plain"]
    return [
        Figure("ZeRO-3 / plain", medians_s["zero"] / medians_s["plain"], TIMES_PLAIN, aim=AIMS.get(rank.world_size)),
        Figure("overhead per module", overhead_s / module_count * 1e6, "µs"),
        Figure("plain", medians_s["plain"] * 1e3, "ms"),
    ]


CASE = Case(title=f"forward, one token (Llama, {LAYERS} layers, hidden {HIDDEN}, no grad)", measure=measure)
