"""A model that takes one of two branches in turn, against the same model always taking one: what a surprise costs."""

from __future__ import annotations

from benchmarks.case import Case, Rank
from benchmarks.figure import Aim, Figure

HIDDEN = 64
LIVE_NUMEL = 12 * HIDDEN * HIDDEN
PREFETCH_NUMEL = 3 * HIDDEN * HIDDEN


def measure(rank: Rank) -> list[Figure]:
    """Counts all-gathers, bytes and whole elements of training steps, with no clock in it."""
    import torch

    from benchmarks import workload
    from benchmarks.traffic import LivePeak, Traffic

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(HIDDEN, HIDDEN)
            self.branches = torch.nn.ModuleList(
                torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(4))) for _ in range(2)
            )
            self.last = torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            output: torch.Tensor = self.last(self.branches[branch](self.first(x)))
            return output

    steps = rank.choose(full=40, quick=8)
    warm_ups = 8
    config = workload.zero3_config(learning_rate=1e-4)
    config["zero_optimization"].update(
        stage3_prefetch_bucket_size=PREFETCH_NUMEL,
        stage3_max_live_parameters=LIVE_NUMEL,
        stage3_max_reuse_distance=LIVE_NUMEL,
    )
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(workload.SEED))

    def run(schedule: tuple[int, ...]) -> tuple[float, float, float]:
        torch.manual_seed(workload.SEED)
        engine = workload.zero3_engine(Branches(), config)
        peak = LivePeak(engine.module)
        traffic = Traffic()
        for step in range(warm_ups + steps):
            if step == warm_ups:
                traffic = Traffic()
            engine.backward(engine(x, schedule[step % len(schedule)]).square().mean())
            engine.step()
        engine.destroy()
        return traffic.gathers / steps, traffic.received_bytes / steps, peak.numel

    with workload.process_group():
        static = run((0,))
        turns = run((0, 1))
    return [
        Figure("all-gathers, in turn / always one", turns[0] / static[0], "×", aim=Aim(1.1)),
        Figure("bytes, in turn / always one", turns[1] / static[1], "×", aim=Aim(1.1)),
        Figure("all-gathers per step, in turn", turns[0], "calls"),
        Figure("whole elements at most, of max_live_parameters", turns[2] / LIVE_NUMEL, "×", aim=Aim(1.0)),
    ]


CASE = Case(title="training step, two branches in turn", measure=measure, world_sizes=(2,))
