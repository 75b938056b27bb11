"""A training step of a small Llama: forward, backward and AdamW."""

from __future__ import annotations

from benchmarks.case import Case, Rank
from benchmarks.figure import TIMES_PLAIN, Figure
from benchmarks.timing import interleaved_medians_s

LAYERS = 8
HIDDEN = 128
BATCH = 4
SEQUENCE = 128
LEARNING_RATE = 1e-4


def measure(rank: Rank) -> list[Figure]:
    """Times steps with and without ZeRO-3.

    Every rank takes the same batch, so that the averaged gradients equal those of plain torch on one rank and the
    losses can be compared. Plain torch exchanges no gradients: the ratio at two ranks holds the whole price of ZeRO-3.
    """
    import torch

    from benchmarks import workload

    config = workload.llama(LAYERS, HIDDEN)
    generator = torch.Generator().manual_seed(workload.SEED)
    tokens = torch.randint(config.vocab_size, (BATCH, SEQUENCE), generator=generator)
    with workload.process_group():
        plain = workload.build(config).train()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
        engine = workload.zero3_engine(
            workload.build(config).train(), workload.zero3_config(micro_batch=BATCH, learning_rate=LEARNING_RATE)
        )
        losses: dict[str, torch.Tensor] = {}

        def plain_step() -> None:
            loss = plain(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses["plain"] = loss.detach()

        def zero_step() -> None:
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses["zero"] = loss.detach()

        medians_s = interleaved_medians_s(
            {"plain": plain_step, "zero": zero_step},
            samples=rank.choose(full=16, quick=3),
            warm_ups=rank.choose(full=4, quick=2),
            line_up=torch.distributed.barrier,
        )
        workload.require_close("loss after the last step", losses["plain"], losses["zero"])
    return [
        Figure("ZeRO-3 / plain", medians_s["zero"] / medians_s["plain"], TIMES_PLAIN),
        Figure("plain", medians_s["plain"] * 1e3, "ms"),
    ]


CASE = Case(
    title=f"training step (Llama, {LAYERS} layers, hidden {HIDDEN}, {BATCH} × {SEQUENCE} tokens, AdamW)",
    measure=measure,
)
