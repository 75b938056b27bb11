"""Dividing units that cannot be cut (heads, grains of columns) so that ranks hold about the same. No torch in it."""

from __future__ import annotations

from collections.abc import Sequence


def divide(units: int, needs: Sequence[float], least: int = 1) -> list[int]:
    """``units`` in proportion to ``needs``, at least ``least`` for each; what is left over goes to the largest
    remainders, to the lower index where they are equal.

    Raises ValueError if there are too few units.
    """
    parts = len(needs)
    if units < least * parts:
        raise ValueError(f"{units} units cannot give {parts} parts {least} each")
    spare = units - least * parts
    wanted = [max(need, 0.0) for need in needs]
    total = sum(wanted)
    ideal = [units * need / total if total else units / parts for need in wanted]
    over = [max(share - least, 0.0) for share in ideal]
    scale = spare / sum(over) if sum(over) else 0.0
    exact = [share * scale for share in over]
    given = [int(share + 1e-9) for share in exact]
    by_remainder = sorted(range(parts), key=lambda index: (given[index] - exact[index], index))
    for index in by_remainder[: spare - sum(given)]:
        given[index] += 1
    return [least + count for count in given]


def grain_that_fits(length: int, parts: int, grain: int) -> int:
    """The largest of ``grain``, ``grain / 2``, ... of which ``length`` has one for each part; at least 1."""
    while grain > 1 and length // grain < parts:
        grain //= 2
    return max(grain, 1)


def in_grains(length: int, needs: Sequence[float], grain: int) -> list[tuple[int, int]]:
    """``length`` indices as one span for each need, cut at multiples of ``grain``; the last span has the tail."""
    counts = divide(length // grain, needs)
    spans, start = [], 0
    for index, count in enumerate(counts):
        stop = length if index == len(counts) - 1 else start + count * grain
        spans.append((start, stop))
        start = stop
    return spans


def heads_by_group(heads: int, kv_heads: int, needs: Sequence[float]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """For each rank its span of query heads and its span of key-value heads.

    Query head ``h`` uses key-value head ``h // (heads // kv_heads)``, and on each rank all key-value heads have the
    same number of query heads, since models repeat all of them by one number. With at least as many key-value heads
    as ranks a rank has whole groups; with fewer, several ranks share one key-value head, of which each has a copy.

    Raises ValueError if there are fewer query heads than ranks.
    """
    ranks = len(needs)
    group = heads // kv_heads
    if heads < ranks:
        raise ValueError(f"{heads} heads cannot be divided among {ranks} ranks")
    if kv_heads >= ranks:
        kv_spans = in_grains(kv_heads, needs, 1)
        return [((start * group, stop * group), (start, stop)) for start, stop in kv_spans]
    sharers = divide(ranks, [1.0] * kv_heads)
    neediest = sorted(range(ranks), key=lambda rank: (-needs[rank], rank))
    spans: list[tuple[tuple[int, int], tuple[int, int]]] = [((0, 0), (0, 0))] * ranks
    taken = 0
    # The fewer ranks share a key-value head, the more query heads each of them gets: the neediest first.
    for kv_head in sorted(range(kv_heads), key=lambda head: (sharers[head], head)):
        members = sorted(neediest[taken : taken + sharers[kv_head]])
        taken += sharers[kv_head]
        queries = in_grains(group, [needs[rank] for rank in members], 1)
        for rank, (start, stop) in zip(members, queries):
            spans[rank] = ((kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1))
    return spans
