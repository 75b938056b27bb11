"""Greedy generation with a key-value cache, by a dense model and by a mixture of experts.

Then each rank answers prompts of its own: as many new tokens on each, and of very different numbers. transformers
knows of ZeRO-3 there, as in a Trainer's script, so that ranks wait for each other where they have to.
"""

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
        figures += _rollouts(rank)
    return figures


def _rollouts(rank: Rank) -> list[Figure]:
    """All ranks' tokens, by the time until the last rank is done."""
    import time

    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from benchmarks import workload

    config = workload.llama(LAYERS, HIDDEN)
    plain = workload.build(config).eval()
    zero = workload.zero3_engine(workload.build(config).eval(), workload.zero3_config()).module
    prompt = torch.randint(3, config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(rank.rank))
    most = rank.choose(full=24, quick=8)
    ways = {
        "each rank as many new tokens": [most] * rank.world_size,
        "uneven numbers of new tokens": [most // 2**n for n in range(rank.world_size)],
    }

    def seconds(model: Any, new_tokens: int) -> float:
        torch.distributed.barrier()
        begin_s = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
        torch.distributed.barrier()
        if output.shape[1] != PROMPT + new_tokens:
            raise RuntimeError(f"expected {new_tokens} new tokens, got {output.shape[1] - PROMPT}")
        return time.perf_counter() - begin_s

    figures = []
    for way, numbers in ways.items():
        best_s: dict[str, float] = {}
        for _ in range(rank.choose(full=2, quick=1) + 1):
            plain_s = seconds(plain, numbers[rank.rank])
            alive = HfDeepSpeedConfig(workload.zero3_config())
            zero_s = seconds(zero, numbers[rank.rank])
            del alive
            best_s = {
                "plain": min(plain_s, best_s.get("plain", plain_s)),
                "zero": min(zero_s, best_s.get("zero", zero_s)),
            }
        figures += [
            Figure(f"{way}, ZeRO-3 / plain", best_s["zero"] / best_s["plain"], TIMES_PLAIN),
            Figure(f"{way}, ZeRO-3", sum(numbers) / best_s["zero"], "tokens/s", Better.HIGHER),
        ]
    return figures


CASE = Case(
    title=f"generate (greedy, {LAYERS} layers, hidden {HIDDEN}, {PROMPT} tokens of prompt)",
    measure=measure,
    world_sizes=(2, 4),
)
