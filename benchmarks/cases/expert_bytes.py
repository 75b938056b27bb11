"""How much is moved for a token through a mixture of 32 experts in `ModuleList`s, of which a token visits two."""

from __future__ import annotations

from benchmarks.case import Case, Rank
from benchmarks.figure import Figure

EXPERTS = 32
TOP_K = 2
BLOCKS = 4
HIDDEN = 64
WIDTH = 256
TOKENS = 16


def measure(rank: Rank) -> list[Figure]:
    """Counts what all-gathers bring a rank that runs tokens of its own, one by one.

    Each block is a leaf module, without which ranks that choose different experts hang with the base; the fork's ranks
    read where they can, and gather together where they are told to.
    """
    import copy

    import torch
    from deepspeed.utils import set_z3_leaf_modules

    from benchmarks import workload
    from benchmarks.traffic import Traffic

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.Linear(HIDDEN, EXPERTS)
            self.experts = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(HIDDEN, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, HIDDEN))
                for _ in range(EXPERTS)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """``(1, HIDDEN)`` to the same."""
            weights, chosen = torch.softmax(self.router(x), dim=-1).topk(TOP_K, dim=-1)
            parts = [weight * self.experts[number](x) for weight, number in zip(weights[0], chosen[0].tolist())]
            return x + torch.stack(parts).sum(dim=0)

    torch.manual_seed(workload.SEED)
    plain = torch.nn.Sequential(*(Block() for _ in range(BLOCKS))).eval()
    tokens = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(rank.rank))
    model_bytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    figures = []
    with workload.process_group(), torch.no_grad():
        traffic = Traffic()
        for way, gather in (
            ("blocks gathered together", "collective"),
            ("by default", None),
        ):
            model = copy.deepcopy(plain)
            set_z3_leaf_modules(model, [Block])
            engine = workload.zero3_engine(model, workload.zero3_config(gather=gather))
            before_bytes = traffic.received_bytes
            for token in tokens:
                workload.require_close("outputs", plain(token), engine(token))
            moved_bytes = traffic.received_bytes - before_bytes
            figures.append(Figure(f"received per token, {way}", moved_bytes / TOKENS / model_bytes, "× model"))
    return figures


CASE = Case(
    title=f"bytes per token, {BLOCKS} blocks of {EXPERTS} experts, top {TOP_K} (no grad)",
    measure=measure,
    world_sizes=(2,),
)
