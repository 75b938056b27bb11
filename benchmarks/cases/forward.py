"""The forward of a deep and narrow model for one token: all of it is overhead, nearly none of it arithmetic."""

from __future__ import annotations

from benchmarks.case import Case, Rank
from benchmarks.figure import TIMES_PLAIN, Aim, Figure
from benchmarks.timing import interleaved_medians_s

LAYERS = 24
HIDDEN = 128
AIMS = {1: Aim(1.1), 2: Aim(1.15)}
COLLECTIVE_AIMS = {2: Aim(3.0)}


def measure(rank: Rank) -> list[Figure]:
    """Times the forward without grad of the same model without ZeRO-3, with it, and where its ranks gather together."""
    import torch

    from benchmarks import workload

    config = workload.llama(LAYERS, HIDDEN)
    token = torch.tensor([[7]])
    with workload.process_group(), torch.no_grad():
        plain = workload.build(config).eval()
        engine = workload.zero3_engine(workload.build(config).eval(), workload.zero3_config())
        collective = workload.zero3_engine(workload.build(config).eval(), workload.zero3_config(gather="collective"))
        for each in (engine, collective):
            workload.require_close("logits", plain(token, use_cache=False).logits, each(token, use_cache=False).logits)
        medians_s = interleaved_medians_s(
            {
                "plain": lambda: plain(token, use_cache=False),
                "zero": lambda: engine(token, use_cache=False),
                "collective": lambda: collective(token, use_cache=False),
            },
            samples=rank.choose(full=60, quick=10),
            warm_ups=rank.choose(full=10, quick=3),
            line_up=torch.distributed.barrier,
        )
    module_count = sum(1 for _ in plain.modules())
    overhead_s = medians_s["zero"] - medians_s["plain"]
    together = medians_s["collective"] / medians_s["plain"]
    return [
        Figure("ZeRO-3 / plain", medians_s["zero"] / medians_s["plain"], TIMES_PLAIN, aim=AIMS.get(rank.world_size)),
        Figure("ZeRO-3 that gathers together / plain", together, TIMES_PLAIN, aim=COLLECTIVE_AIMS.get(rank.world_size)),
        Figure("overhead per module", overhead_s / module_count * 1e6, "µs"),
        Figure("plain", medians_s["plain"] * 1e3, "ms"),
    ]


CASE = Case(title=f"forward, one token (Llama, {LAYERS} layers, hidden {HIDDEN}, no grad)", measure=measure)
