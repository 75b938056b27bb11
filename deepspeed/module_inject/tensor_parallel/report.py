"""What a user is told about a plan: one line when it is carried out, an error when it would leave a model whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from .layout import Plan
from .loading import Loaded

LEAST_SHARE = 0.9
"""Of the elements that could be divided, at least so many are, or init_inference raises."""
_NAMED = 12
_MB = 1_000_000


def summary(plan: Plan, element_bytes: int, loaded: Optional[Loaded]) -> str:
    """Parameters and bytes of each rank, how much of the model is divided, and what was read if it was loaded."""
    numels = plan.rank_numels()
    each = ", ".join(f"{numel:,} ({numel * element_bytes / _MB:,.1f} MB)" for numel in numels)
    reasons = sorted(set(plan.whole.values()))
    kept = f"; whole on every rank: norms{''.join(f', {reason}' for reason in reasons)}" if plan.ranks > 1 else ""
    read = f"; rank 0 read {loaded.bytes_read / _MB:,.1f} MB in {loaded.seconds:.1f} s" if loaded else ""
    return (
        f"Tensor parallelism over {plan.ranks} ranks: {plan.total_numel:,} parameters"
        f" ({plan.total_numel * element_bytes / _MB:,.1f} MB); each rank holds {each}."
        f" {100 * plan.split_share:.1f} % of what can be divided is{kept}{read}"
    )


def refusal(share: float, ranks: int, unsplit: Sequence[tuple[str, str]]) -> str:
    """The error for a model of which less than LEAST_SHARE would be divided. ``unsplit``: names and reasons."""
    lines = [f"  {name}: {reason}" for name, reason in unsplit[:_NAMED]]
    if len(unsplit) > _NAMED:
        lines.append(f"  and {len(unsplit) - _NAMED} more")
    return (
        f"tp_size={ranks}, but only {100 * share:.1f} % of this model's matrices can be divided among the ranks"
        f" (at least {100 * LEAST_SHARE:.0f} % are expected); on every rank these would stay whole:\n"
        + "\n".join(lines)
        + "\nName the linear layers whose outputs are to be added up over the ranks, for each class of layers:"
        " injection_policy={YourLayer: ('attention.output', 'mlp.down')}; their neighbours are then divided by output"
        " features. Or use tp_size=1. docs/tensor_parallel.md says which structures are known"
    )
