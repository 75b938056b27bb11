"""A block of many tiny experts in a `ModuleList`, all of which run: the cost of a module, in forward and backward."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Rank
from benchmarks.figure import TIMES_PLAIN, Figure
from benchmarks.timing import interleaved_medians_s

EXPERTS = 128
HIDDEN = 8


def measure(rank: Rank) -> list[Figure]:
    """Times one training step of the block with and without ZeRO-3, and counts its collectives."""
    import copy

    import torch

    from benchmarks import workload
    from benchmarks.traffic import Traffic

    def experts() -> torch.nn.Module:
        torch.manual_seed(workload.SEED)
        linears = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3 * EXPERTS))
        return torch.nn.Sequential(*(torch.nn.Sequential(a, b, c) for a, b, c in zip(linears, linears, linears)))

    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(workload.SEED))
    with workload.process_group():
        plain = experts()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        engine = workload.zero3_engine(copy.deepcopy(plain), workload.zero3_config(learning_rate=1e-4))
        workload.require_close("outputs", plain(x), engine(x))
        traffic = Traffic()
        steps = 0

        def plain_step() -> None:
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def zero_step() -> None:
            nonlocal steps
            steps += 1
            engine.backward(engine(x).square().mean())
            engine.step()

        medians_s = interleaved_medians_s(
            {"plain": plain_step, "zero": zero_step},
            samples=rank.choose(full=20, quick=3),
            warm_ups=rank.choose(full=5, quick=2),
            line_up=torch.distributed.barrier,
        )
    figures: list[Any] = [
        Figure("ZeRO-3 / plain", medians_s["zero"] / medians_s["plain"], TIMES_PLAIN),
        Figure("overhead per linear layer", (medians_s["zero"] - medians_s["plain"]) / (3 * EXPERTS) * 1e6, "µs"),
    ]
    if rank.world_size > 1:
        figures.append(Figure("all-gathers per step", traffic.gathers / steps, "calls"))
    return figures


CASE = Case(title=f"training step, {EXPERTS} experts of 3 Linear({HIDDEN}, {HIDDEN})", measure=measure)
