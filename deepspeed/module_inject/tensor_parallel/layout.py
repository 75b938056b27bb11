"""Deciding which rank holds what: from the blocks of a model to one frozen plan, the same on every rank.

Nothing is touched here, and no process group is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from .balance import grain_that_fits, heads_by_group, in_grains
from .blocks import AttentionBlock, Block, Blocks, Lane, MoeBlock, SizeAttribute, find_blocks
from .roles import Role
from .split import Span, Split

BALANCED = 1.1
"""The largest rank may hold this many times what the smallest one holds."""
SMALLEST_GRAIN = 8
"""Grains are not made smaller than this for the sake of balance: 16 bytes of a 16-bit type, which kernels ask for."""


@dataclass(frozen=True)
class RankSize:
    """A number that ``module`` keeps, for each rank."""

    module: str
    name: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Gathered:
    """A module whose last dimension, of ``features``, is put together from all ranks.

    ``split`` says which of them each rank has: of a norm's input, or of an output layer's output.
    """

    module: str
    features: int
    split: Split


@dataclass(frozen=True)
class LookedUp:
    """An embedding of which each rank has some rows."""

    module: str
    split: Split


@dataclass(frozen=True)
class Plan:
    """Who holds what, and where ranks meet.

    ``splits`` has the parameters that are divided; of those in ``once`` only rank 0 has the values. ``sums`` are
    modules whose outputs are added up over the ranks, ``moe`` those in whose outputs this can, maybe, be done for all
    experts at once. ``unsplit`` are matrices that could be divided if they were understood, ``whole`` those that stay
    whole on purpose; both give the reason. ``indivisible`` are blocks with fewer units than there are ranks. ``grain``
    is what ``tp_grain_size`` became.
    """

    ranks: int
    shapes: Mapping[str, tuple[int, ...]]
    splits: Mapping[str, Split]
    once: tuple[str, ...]
    sums: tuple[str, ...]
    moe: tuple[MoeBlock, ...]
    lookups: tuple[LookedUp, ...]
    outputs: tuple[Gathered, ...]
    norms: tuple[Gathered, ...]
    sizes: tuple[RankSize, ...]
    whole: Mapping[str, str]
    unsplit: Mapping[str, str]
    indivisible: tuple[str, ...]
    grain: int
    notes: tuple[str, ...]

    def numel(self, name: str, rank: int) -> int:
        """Elements of a parameter on one rank."""
        if name in self.splits:
            return self.splits[name].numel(self.shapes[name], rank)
        return _numel(self.shapes[name])

    def rank_numels(self) -> list[int]:
        """Elements of all parameters, for each rank."""
        return [sum(self.numel(name, rank) for name in self.shapes) for rank in range(self.ranks)]

    @property
    def total_numel(self) -> int:
        return sum(map(_numel, self.shapes.values()))

    @property
    def split_share(self) -> float:
        """Elements that are divided among those that could be: between 0 and 1, and 1 if there are none."""
        split = sum(_numel(self.shapes[name]) for name in self.splits if len(self.shapes[name]) > 1)
        unsplit = sum(_numel(self.shapes[name]) for name in self.unsplit)
        return split / (split + unsplit) if split + unsplit else 1.0


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def plan(model: nn.Module, ranks: int, grain: int, roles: Mapping[str, Role]) -> Plan:
    """Divide ``model`` among ``ranks``.

    ``grain`` is the number of columns that are wanted together (``tp_grain_size``). It is halved as long as a rank
    would otherwise hold more than BALANCED times what another one holds.
    """
    if ranks < 1 or grain < 1:
        raise ValueError(f"expected at least one rank and a grain of at least 1, got {ranks} and {grain}")
    blocks = find_blocks(model, roles)
    best = _plan(model, blocks, ranks, grain)
    smaller = grain
    while _imbalance(best) > BALANCED and smaller > SMALLEST_GRAIN:
        smaller = max(smaller // 2, SMALLEST_GRAIN)
        candidate = _plan(model, blocks, ranks, smaller)
        if _imbalance(candidate) < _imbalance(best):
            best = candidate
    if best.grain < grain:
        note = f"cut at multiples of {best.grain} instead of tp_grain_size={grain}, so that ranks hold about the same"
        return replace(best, notes=(note, *best.notes))
    return best


def _imbalance(plan: Plan) -> float:
    numels = plan.rank_numels()
    return max(numels) / max(min(numels), 1)


@dataclass
class _Draft:
    """What has been decided so far, and how much each rank holds by that."""

    ranks: int
    shapes: Mapping[str, tuple[int, ...]]
    loads: list[float]
    ahead: float
    """Elements of blocks that are still to be divided."""
    splits: dict[str, Split] = field(default_factory=dict)
    sizes: list[RankSize] = field(default_factory=list)
    unsplit: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def needs(self) -> list[float]:
        """What each rank lacks of its share of everything."""
        share = (sum(self.loads) + self.ahead) / self.ranks
        return [share - load for load in self.loads]

    def cut(self, lane: Lane, spans: Sequence[Span]) -> None:
        cut = tuple(
            tuple((base + start * lane.width, base + stop * lane.width) for base in lane.starts)
            for start, stop in spans
        )
        split = Split(lane.dim, cut)
        self.splits[lane.parameter] = split
        for rank in range(self.ranks):
            self.loads[rank] += split.numel(self.shapes[lane.parameter], rank)

    def size(self, attribute: SizeAttribute, spans: Sequence[Span]) -> None:
        values = tuple((stop - start) * attribute.width for start, stop in spans)
        self.sizes.append(RankSize(attribute.module, attribute.name, values))


def _block_numel(block: Block, shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(_numel(shapes[lane.parameter]) for lane in block.all_lanes)


def _plan(model: nn.Module, blocks: Blocks, ranks: int, grain: int) -> Plan:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    vocabulary = [blocks.vocabulary] if blocks.vocabulary else []
    every: list[Block] = [*blocks.attention, *blocks.feed_forward, *vocabulary]
    # Coarse units first: what attention heads leave uneven, columns and rows of the vocabulary make good.
    ahead = sum(_block_numel(block, shapes) for block in every)
    draft = _Draft(ranks, shapes, [0.0] * ranks, ahead)
    norms: list[Gathered] = []
    sums: list[str] = []
    divided: list[Block] = []
    for block in every:
        if block.units < ranks:
            reason = f"{block.units} {'heads' if isinstance(block, AttentionBlock) else 'units'} for {ranks} ranks"
            draft.unsplit.update(
                {lane.parameter: reason for lane in block.all_lanes if len(shapes[lane.parameter]) > 1}
            )
        elif isinstance(block, AttentionBlock):
            norms += _divide_attention(draft, block)
            divided.append(block)
        else:
            _divide(draft, block, grain)
            divided.append(block)
        draft.ahead -= _block_numel(block, shapes)
    done = {term for block in divided for term in block.terms}
    moe = tuple(
        replace(block, terms=tuple(term for term in block.terms if term in done))
        for block in blocks.moe
        if not done.isdisjoint(block.terms)
    )
    in_moe = {term for block in moe for term in block.terms}
    lookups: list[LookedUp] = []
    outputs: list[Gathered] = []
    modules = dict(model.named_modules())
    for block in divided:
        if block is blocks.vocabulary:
            split = draft.splits[block.lanes[0].parameter]
            lookups += [LookedUp(name, split) for name in block.terms]
            outputs += [Gathered(name, modules[name].out_features, split) for name in blocks.vocabulary.heads]
        else:
            sums += [term for term in block.terms if term not in in_moe]
    unsplit = {**_not_understood(model, draft.splits, blocks.whole), **draft.unsplit}
    return Plan(
        ranks=ranks,
        shapes=shapes,
        splits=draft.splits,
        once=tuple(name for block in divided for name in block.once) if ranks > 1 else (),
        sums=tuple(sums),
        moe=moe,
        lookups=tuple(lookups),
        outputs=tuple(outputs),
        norms=tuple(norms),
        sizes=tuple(draft.sizes),
        whole=dict(blocks.whole),
        unsplit=unsplit,
        indivisible=tuple(block.name for block in every if block.units < ranks),
        grain=grain,
        notes=tuple(draft.notes),
    )


def _divide(draft: _Draft, block: Block, grain: int) -> None:
    fitting = grain_that_fits(block.units, draft.ranks, grain)
    if fitting < grain:
        draft.notes.append(
            f"{block.name}: {block.units} units do not give {draft.ranks} ranks {grain} each, "
            f"so it is cut at multiples of {fitting}"
        )
    spans = in_grains(block.units, draft.needs(), fitting)
    for lane in block.lanes:
        draft.cut(lane, spans)
    for attribute in block.sizes:
        draft.size(attribute, spans)


def _divide_attention(draft: _Draft, block: AttentionBlock) -> list[Gathered]:
    spans = heads_by_group(block.units, block.kv_heads, draft.needs())
    queries, kv = [query for query, _ in spans], [kv for _, kv in spans]
    for lane in block.lanes:
        draft.cut(lane, queries)
    for lane in block.kv_lanes:
        draft.cut(lane, kv)
    for attribute in block.sizes:
        draft.size(attribute, queries)
    for attribute in block.kv_sizes:
        draft.size(attribute, kv)
    if block.kv_lanes:
        repeats = tuple((q[1] - q[0]) // (k[1] - k[0]) for q, k in spans)
        draft.sizes.append(RankSize(block.name, "num_key_value_groups", repeats))
    norms = []
    for norm in block.norms:
        held = kv if norm.of_keys else queries
        split = Split(-1, tuple(((start * norm.width, stop * norm.width),) for start, stop in held))
        features = (block.kv_heads if norm.of_keys else block.units) * norm.width
        norms.append(Gathered(norm.module, features, split))
    return norms


def _not_understood(model: nn.Module, splits: Mapping[str, Split], whole: Mapping[str, str]) -> dict[str, str]:
    """Matrices that no block has. Tables that are looked up by something else than tokens do not count."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    unsplit: dict[str, str] = {}
    for module_name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            name = names[id(parameter)]
            if parameter.dim() < 2 or name in splits or name in whole or isinstance(module, nn.Embedding):
                continue
            unsplit[name] = f"{type(module).__name__} {module_name!r} is in no pattern that is known"
    return unsplit
