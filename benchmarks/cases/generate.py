"""Greedy generation with a key-value cache, by a dense model and by a mixture of experts."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Rank
from benchmarks.figure import TIMES_PLAIN, Better, Figure
from benchmarks.timing import interleaved_medians_s

LAYERS = 4
HIDDEN = 128
PROMPT = 16


def measure(rank: Rank) -> list[Figure]:
    """Times `generate` of both models with and without ZeRO-3; every rank gives the same prompt."""
    import torch

    from benchmarks import workload

    new_tokens = rank.choose(full=32, quick=8)
    generator = torch.Generator().manual_seed(workload.SEED)
    figures: list[Figure] = []
    with workload.process_group(), torch.no_grad():
        for family, config in {
            "Llama": workload.llama(LAYERS, HIDDEN),
            "Mixtral": workload.mixtral(LAYERS, HIDDEN),
        }.items():
            prompt = torch.randint(3, config.vocab_size, (1, PROMPT), generator=generator)
            plain = workload.build(config).eval()
            zero = workload.zero3_engine(workload.build(config).eval(), workload.zero3_config()).module

            def generate(model: Any, prompt: torch.Tensor = prompt) -> torch.Tensor:
                return model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    use_cache=True,
                    min_new_tokens=new_tokens,
                    max_new_tokens=new_tokens,
                )

            workload.require_close(f"tokens of {family}", generate(plain), generate(zero))
            medians_s = interleaved_medians_s(
                {"plain": lambda: generate(plain), "zero": lambda: generate(zero)},  # noqa: B023 (called in this turn)
                samples=rank.choose(full=6, quick=2),
                warm_ups=1,
                line_up=torch.distributed.barrier,
            )
            figures += [
                Figure(
                    f"{family}, time per token, ZeRO-3 / plain", medians_s["zero"] / medians_s["plain"], TIMES_PLAIN
                ),
                Figure(f"{family}, ZeRO-3", new_tokens / medians_s["zero"], "tokens/s", Better.HIGHER),
                Figure(f"{family}, plain", new_tokens / medians_s["plain"], "tokens/s", Better.HIGHER),
            ]
    return figures


CASE = Case(title=f"generate (greedy, {LAYERS} layers, hidden {HIDDEN}, {PROMPT} tokens of prompt)", measure=measure)
