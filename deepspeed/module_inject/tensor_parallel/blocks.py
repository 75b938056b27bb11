"""Finding, in a model's structure, the parts whose work can be divided among ranks.

A block is a set of parameters that share one dimension which nobody outside needs: the heads of an attention, the
intermediate columns of an MLP or of experts, the vocabulary. Each rank holds some of these units of all parameters of
the block, and what comes out is a sum over the ranks.

Only what is understood completely becomes a block: every parameter of its module must have a known part in it, and
all shapes must agree. The rest stays whole, with a reason. Parameters may be on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from torch import nn

from .roles import Role


@dataclass(frozen=True)
class Lane:
    """A parameter that runs along the units of a block.

    Unit ``u`` is the ``width`` indices from ``start + u * width`` along ``dim``, for each of ``starts``: two of them
    where a gate and an up projection lie one after the other in one parameter.
    """

    parameter: str
    dim: int
    width: int = 1
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class SizeAttribute:
    """A number that a module keeps of its units, and that its forward may read: ``width`` for each unit."""

    module: str
    name: str
    width: int = 1


@dataclass(frozen=True)
class Block:
    """Parameters that are divided together, in ``units`` units.

    ``terms`` are the modules whose outputs, of ``hidden`` features, are partial sums. Of the parameters in ``once``
    only the first rank has the values, since they are added to each partial sum.
    """

    name: str
    units: int
    hidden: int
    lanes: tuple[Lane, ...]
    terms: tuple[str, ...]
    once: tuple[str, ...] = ()
    sizes: tuple[SizeAttribute, ...] = ()

    @property
    def all_lanes(self) -> tuple[Lane, ...]:
        return self.lanes


@dataclass(frozen=True)
class FusedExperts(Block):
    """``experts`` experts in the 3-D parameters of one module."""

    experts: int = 0


@dataclass(frozen=True)
class WholeNorm:
    """A norm over the features of all heads: its input is gathered, and its output taken apart again."""

    module: str
    of_keys: bool
    width: int


@dataclass(frozen=True)
class AttentionBlock(Block):
    """``units`` query heads; ``kv_lanes`` and ``kv_sizes`` run along key-value heads."""

    kv_heads: int = 0
    kv_lanes: tuple[Lane, ...] = ()
    kv_sizes: tuple[SizeAttribute, ...] = ()
    norms: tuple[WholeNorm, ...] = ()

    @property
    def all_lanes(self) -> tuple[Lane, ...]:
        return (*self.lanes, *self.kv_lanes)


@dataclass(frozen=True)
class MoeBlock:
    """A module whose output is, maybe, a sum of its experts' outputs: then one sum over the ranks serves them all."""

    name: str
    terms: tuple[str, ...]
    hidden: int
    experts: int


@dataclass(frozen=True)
class Vocabulary(Block):
    """Embeddings, whose outputs are partial sums (``terms``), and output layers, whose outputs are gathered."""

    heads: tuple[str, ...] = ()


@dataclass
class Blocks:
    """What was found in a model. ``whole`` are matrices that stay whole on purpose, with the reason."""

    attention: list[AttentionBlock] = field(default_factory=list)
    feed_forward: list[Block] = field(default_factory=list)
    vocabulary: Optional[Vocabulary] = None
    moe: list[MoeBlock] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


_QUERY = ("q_proj", "query", "q", "wq", "to_q", "q_lin", "q_b_proj")
_KEY_VALUE = ("k_proj", "v_proj", "key", "value", "k", "v", "wk", "wv", "to_k", "to_v", "k_lin", "v_lin")
_EXPANDED_KEY_VALUE = ("kv_b_proj",)
"""Keys and values of every query head, computed from what all of them share."""
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj")
_LATENT_NORM = ("q_a_layernorm", "kv_a_layernorm")
_OF_QUERIES, _OF_KEYS = ("q", "query"), ("k", "key")
"""How names of norms begin."""
_ATTENTION_OUTPUT = ("o_proj", "out_proj", "out", "wo", "to_out", "out_lin", "dense")
_DOWN = ("down_proj", "w2", "fc2", "fc_out", "lin2", "linear2", "dense_4h_to_h", "wo", "down")
_PAIRS = (("fc1", "fc2"), ("lin1", "lin2"), ("linear1", "linear2"))
_PACKED_IN = ("gate_up_proj",)
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
_KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_ATTENTION_WIDTHS = ("hidden_size", "embed_dim", "all_head_size", "inner_dim", "d_model")
_INTERMEDIATE = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size", "ffn_dim")


class Structure:
    """A model's modules and parameters by name; a tied parameter goes by one name."""

    def __init__(self, model: nn.Module, roles: Mapping[str, Role]) -> None:
        self.model = model
        self.roles = roles
        self.modules = dict(model.named_modules())
        self.config: Any = getattr(model, "config", None)
        self.parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    def linears(self, parent: str) -> dict[str, nn.Linear]:
        """The linear layers right under ``parent``, by their names there; without those whose weights are packed."""
        return {
            name: child
            for name, child in self.modules[parent].named_children()
            if isinstance(child, nn.Linear)
            and tuple(child.weight.shape) == (child.out_features, child.in_features)
            and child.weight.is_floating_point()
        }

    def configs(self, module: nn.Module) -> Iterator[Any]:
        """Where numbers of heads may be found: the module, its config, the model's, that of its text model."""
        for source in (module, getattr(module, "config", None), self.config):
            if source is not None:
                yield source
                text = getattr(source, "text_config", None)
                if text is not None:
                    yield text

    def number(self, module: nn.Module, names: Sequence[str]) -> Optional[int]:
        for source in self.configs(module):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None


def join(*names: str) -> str:
    return ".".join(name for name in names if name)


def find_blocks(model: nn.Module, roles: Mapping[str, Role]) -> Blocks:
    """All blocks of a model. ``roles`` settles what the structure alone leaves open."""
    structure = Structure(model, roles)
    found = Blocks()
    vocabulary = _vocabulary(structure)
    found.vocabulary = vocabulary
    taken = set(vocabulary.heads) if vocabulary else set()
    for name, module in structure.modules.items():
        experts = _fused_experts(structure, name, module)
        if experts is not None:
            found.feed_forward.append(experts)
            continue
        linears = {child: linear for child, linear in structure.linears(name).items() if join(name, child) not in taken}
        if len(linears) < 2:
            continue
        attention = _attention(structure, name, module, linears, found.whole)
        if attention is not None:
            found.attention.append(attention)
            continue
        mlp = _mlp(structure, name, module, linears)
        if mlp is not None:
            found.feed_forward.append(mlp)
    _leave_shared_parameters(found)
    found.moe = _moe_blocks(structure, found)
    _note_small_parts_of_moe(structure, found)
    return found


def _leave_shared_parameters(found: Blocks) -> None:
    """Blocks that have a parameter in common with another one would have to agree on how it is cut: all stay whole."""
    blocks: list[Block] = [*found.attention, *found.feed_forward]
    if found.vocabulary is not None:
        blocks.append(found.vocabulary)
    uses = Counter(lane.parameter for block in blocks for lane in block.all_lanes)
    shared = {block.name for block in blocks if any(uses[lane.parameter] > 1 for lane in block.all_lanes)}
    found.attention = [block for block in found.attention if block.name not in shared]
    found.feed_forward = [block for block in found.feed_forward if block.name not in shared]
    if found.vocabulary is not None and found.vocabulary.name in shared:
        found.vocabulary = None


def _linear_lanes(structure: Structure, linear: nn.Linear, role: Role, width: int, starts: tuple[int, ...] = (0,)):
    """The lanes of a layer whose output (COLUMN) or input (ROW) features are units of ``width``."""
    lanes = [Lane(structure.name_of(linear.weight), 0 if role is Role.COLUMN else 1, width, starts)]
    if linear.bias is not None and role is Role.COLUMN:
        lanes.append(Lane(structure.name_of(linear.bias), 0, width, starts))
    return lanes


def _bias_names(structure: Structure, linears: Sequence[nn.Linear]) -> tuple[str, ...]:
    return tuple(structure.name_of(linear.bias) for linear in linears if linear.bias is not None)


def _pick(linears: Mapping[str, nn.Linear], names: Sequence[str]) -> dict[str, nn.Linear]:
    return {name: linear for name, linear in linears.items() if name in names}


def _attention(
    structure: Structure, name: str, module: nn.Module, linears: Mapping[str, nn.Linear], whole: dict[str, str]
) -> Optional[AttentionBlock]:
    queries, outputs = _pick(linears, _QUERY), _pick(linears, _ATTENTION_OUTPUT)
    keys = _pick(linears, _KEY_VALUE)
    expanded, latent = _pick(linears, _EXPANDED_KEY_VALUE), _pick(linears, _LATENT)
    known = {**queries, **outputs, **keys, **expanded, **latent}
    if known.keys() != linears.keys() or not (queries and outputs and (keys or expanded)):
        queries, keys, outputs = _attention_by_roles(structure, name, module, linears)
        expanded, latent = {}, {}
    if not queries or len(outputs) != 1 or len(queries) != 1:
        return None
    (query,), (output,) = queries.values(), outputs.values()

    head_dim = getattr(module, "head_dim", None)
    heads = structure.number(module, _HEAD_COUNTS)
    if isinstance(head_dim, int) and head_dim > 0 and output.in_features % head_dim == 0 and not expanded:
        heads = output.in_features // head_dim
    if not heads or query.out_features % heads or output.in_features % heads:
        return None
    if not expanded and query.out_features != output.in_features:
        return None
    width = query.out_features // heads
    kv_heads = heads
    if keys:
        key_features = {linear.out_features for linear in keys.values()}
        if len(key_features) != 1 or len(keys) != 2:
            return None
        (features,) = key_features
        if features % width or heads % (features // width):
            return None
        kv_heads = features // width
    if any(linear.out_features % heads for linear in expanded.values()):
        return None

    lanes = _linear_lanes(structure, query, Role.COLUMN, width)
    for linear in expanded.values():
        lanes += _linear_lanes(structure, linear, Role.COLUMN, linear.out_features // heads)
    lanes += _linear_lanes(structure, output, Role.ROW, output.in_features // heads)
    kv_lanes = [lane for linear in keys.values() for lane in _linear_lanes(structure, linear, Role.COLUMN, width)]
    rest = _small_parts(structure, name, module, linears, heads, kv_heads, width)
    if rest is None:
        return None
    own_lanes, own_kv_lanes, norms = rest
    for linear in latent.values():
        whole[structure.name_of(linear.weight)] = "latent projection: all heads use all of its output"
    (output_name,) = outputs
    return AttentionBlock(
        name=name,
        units=heads,
        hidden=output.out_features,
        lanes=(*lanes, *own_lanes),
        terms=(join(name, output_name),),
        once=_bias_names(structure, [output]),
        sizes=_sizes(name, module, _HEAD_COUNTS, heads, 1)
        + _sizes(name, module, _ATTENTION_WIDTHS, output.in_features, output.in_features // heads),
        kv_heads=kv_heads,
        kv_lanes=(*kv_lanes, *own_kv_lanes),
        kv_sizes=_sizes(name, module, _KV_HEAD_COUNTS, kv_heads, 1),
        norms=norms,
    )


def _attention_by_roles(
    structure: Structure, name: str, module: nn.Module, linears: Mapping[str, nn.Linear]
) -> tuple[dict[str, nn.Linear], dict[str, nn.Linear], dict[str, nn.Linear]]:
    """Query, key-value and output layers whose names say nothing: one is declared ROW, three others COLUMN.

    They are told apart by the order in which the module has them: query, key, value.
    """
    roles = {child: structure.roles.get(join(name, child)) for child in linears}
    rows = [child for child, role in roles.items() if role is Role.ROW]
    columns = [child for child, role in roles.items() if role is Role.COLUMN]
    if len(rows) != 1 or len(columns) != 3 or len(linears) != 4:
        return {}, {}, {}
    query, *key_values = columns
    return (
        {query: linears[query]},
        {child: linears[child] for child in key_values},
        {rows[0]: linears[rows[0]]},
    )


def _small_parts(
    structure: Structure,
    name: str,
    module: nn.Module,
    linears: Mapping[str, nn.Linear],
    heads: int,
    kv_heads: int,
    width: int,
) -> Optional[tuple[list[Lane], list[Lane], tuple[WholeNorm, ...]]]:
    """What an attention has beside its linear layers: a number for each head, and norms. None if there is more."""
    lanes: list[Lane] = []
    kv_lanes: list[Lane] = []
    norms: list[WholeNorm] = []
    for _, parameter in module.named_parameters(recurse=False):
        if parameter.shape[0] != heads:
            return None
        lanes.append(Lane(structure.name_of(parameter), 0))
    for child_name, child in module.named_children():
        parameters = list(child.parameters())
        if child_name in linears or child_name in _LATENT_NORM or not parameters:
            continue
        of_keys = child_name.split("_")[0] in _OF_KEYS
        count = kv_heads if of_keys else heads
        shapes = {tuple(parameter.shape) for parameter in parameters}
        if shapes == {(width,)}:
            continue  # the same norm for each head
        if not of_keys and child_name.split("_")[0] not in _OF_QUERIES:
            return None  # of what? A norm of the attention's input has as many features as one of all queries
        if shapes == {(count, width)}:
            own = kv_lanes if of_keys else lanes
            own += [Lane(structure.name_of(parameter), 0) for parameter in parameters]
        elif shapes == {(count * width,)}:
            norms.append(WholeNorm(join(name, child_name), of_keys, width))
        else:
            return None
    return lanes, kv_lanes, tuple(norms)


def _sizes(name: str, module: nn.Module, names: Sequence[str], value: int, width: int) -> tuple[SizeAttribute, ...]:
    own = vars(module)
    return tuple(
        SizeAttribute(name, attribute, width)
        for attribute in names
        if isinstance(own.get(attribute), int) and own[attribute] == value
    )


def _mlp(structure: Structure, name: str, module: nn.Module, linears: Mapping[str, nn.Linear]) -> Optional[Block]:
    """Layers side by side that feed one other, with nothing but functions of single elements between them.

    The module may have other parts only if the layers have the names of a known pair, and no part is as wide as what
    is between them. At most two layers are side by side, a gate and what it gates: three would be an attention whose
    heads are not known.
    """
    if len(linears) > 3 or not set(linears).isdisjoint(_QUERY):
        return None
    down_name = _down(structure, name, module, linears)
    if down_name is None:
        return None
    down = linears[down_name]
    units, hidden = down.in_features, down.out_features
    own = {id(parameter) for linear in linears.values() for parameter in linear.parameters()}
    others = [parameter for parameter in module.parameters() if id(parameter) not in own]
    pair = tuple(sorted(linears)) in _PAIRS and units != hidden
    if others and not (pair and all(units not in parameter.shape for parameter in others if parameter.dim() == 1)):
        return None
    lanes = _linear_lanes(structure, down, Role.ROW, 1)
    for child_name, linear in linears.items():
        if child_name == down_name:
            continue
        if linear.in_features != hidden:
            return None
        if linear.out_features == units:
            lanes += _linear_lanes(structure, linear, Role.COLUMN, 1)
        elif linear.out_features == 2 * units and child_name in _PACKED_IN:
            lanes += _linear_lanes(structure, linear, Role.COLUMN, 1, (0, units))
        else:
            return None
    return Block(
        name=name,
        units=units,
        hidden=hidden,
        lanes=tuple(lanes),
        terms=(join(name, down_name),),
        once=_bias_names(structure, [down]),
    )


def _down(structure: Structure, name: str, module: nn.Module, linears: Mapping[str, nn.Linear]) -> Optional[str]:
    """Which of the layers is the last one."""
    rows = [child for child in linears if structure.roles.get(join(name, child)) is Role.ROW]
    if len(rows) == 1:
        return rows[0]
    named = [child for child in linears if child in _DOWN]
    if len(named) == 1:
        return named[0]
    if isinstance(module, nn.Sequential):
        return list(linears)[-1] if len(linears) == 2 else None
    fitting = [
        child
        for child, linear in linears.items()
        if all(
            (other.in_features, other.out_features) == (linear.out_features, linear.in_features)
            for other_child, other in linears.items()
            if other_child != child
        )
    ]
    return fitting[0] if len(fitting) == 1 else None


def _fused_experts(structure: Structure, name: str, module: nn.Module) -> Optional[FusedExperts]:
    """Experts as 3-D parameters ``(experts, ...)`` of one module, as transformers 5 has them.

    Their orientation and packing are what the module itself, or transformers' plan for it, says.
    """
    own = dict(module.named_parameters(recurse=False))
    matrices = {key: parameter for key, parameter in own.items() if parameter.dim() == 3}
    packed = matrices.get("gate_up_proj")
    up, down = matrices.get("up_proj"), matrices.get("down_proj")
    first = packed if packed is not None else up
    if first is None or down is None:
        return None
    transposed = getattr(module, "is_transposed", None)
    concatenated = getattr(module, "is_concatenated", None)
    if concatenated is None and structure.roles.get(join(name, "gate_up_proj")) is Role.COLUMN:
        concatenated = True
    pieces = 2 if packed is not None else 1
    orientations = [
        flag
        for flag in ((False, True) if transposed is None else (transposed,))
        if _fits(first.shape, down.shape, flag, pieces)
    ]
    if len(orientations) != 1 or (packed is not None and concatenated is None):
        return None
    is_transposed = orientations[0]
    units = down.shape[1] if is_transposed else down.shape[2]
    out_dim, in_dim = (2, 1) if is_transposed else (1, 2)

    def first_lane(parameter: nn.Parameter, dim: int, is_packed: bool) -> Lane:
        key = structure.name_of(parameter)
        if not is_packed:
            return Lane(key, dim)
        return Lane(key, dim, 1, (0, units)) if concatenated else Lane(key, dim, 2)

    lanes: list[Lane] = []
    once: list[str] = []
    for key, parameter in own.items():
        if parameter is down:
            lanes.append(Lane(structure.name_of(parameter), in_dim))
        elif key in ("gate_up_proj", "up_proj", "gate_proj") and parameter.dim() == 3:
            lanes.append(first_lane(parameter, out_dim, key == "gate_up_proj"))
        elif key in ("gate_up_proj_bias", "up_proj_bias", "gate_proj_bias") and parameter.dim() == 2:
            lanes.append(first_lane(parameter, 1, key == "gate_up_proj_bias"))
        elif key == "down_proj_bias":
            once.append(structure.name_of(parameter))
        else:
            return None
    if any(list(child.parameters()) for child in module.children()):
        return None  # a norm after each expert, say: no sum may stand between
    return FusedExperts(
        name=name,
        units=units,
        hidden=down.shape[out_dim],
        experts=down.shape[0],
        lanes=tuple(lanes),
        terms=(name,),
        once=tuple(once),
        sizes=_sizes(name, module, _INTERMEDIATE, units, 1),
    )


def _fits(first: Sequence[int], down: Sequence[int], transposed: bool, pieces: int) -> bool:
    """Whether ``(experts, pieces * units, hidden)`` and ``(experts, hidden, units)`` agree, or their transposes."""
    out_dim, in_dim = (2, 1) if transposed else (1, 2)
    return first[0] == down[0] and first[in_dim] == down[out_dim] and first[out_dim] == pieces * down[in_dim]


def _vocabulary(structure: Structure) -> Optional[Vocabulary]:
    embedding, head = _embedding_and_head(structure.model)
    lanes: dict[str, Lane] = {}
    embeddings, heads = [], []
    units = hidden = 0
    for name, module in structure.modules.items():
        tied = isinstance(module, nn.Embedding) and embedding is not None and module.weight is embedding.weight
        if tied and module.max_norm is None and not module.scale_grad_by_freq:
            units, hidden = module.num_embeddings, module.embedding_dim
            embeddings.append(name)
            lanes[structure.name_of(module.weight)] = Lane(structure.name_of(module.weight), 0)
    for name, module in structure.modules.items():
        if module is head and isinstance(module, nn.Linear) and units in (0, module.out_features):
            units = module.out_features
            heads.append(name)
            for lane in _linear_lanes(structure, module, Role.COLUMN, 1):
                lanes[lane.parameter] = lane
    if not lanes:
        return None
    return Vocabulary("vocabulary", units, hidden, tuple(lanes.values()), tuple(embeddings), heads=tuple(heads))


def _embedding_and_head(model: nn.Module) -> tuple[Optional[nn.Module], Optional[nn.Module]]:
    def ask(method: str) -> Optional[nn.Module]:
        try:
            found = getattr(model, method)()
        except (AttributeError, NotImplementedError):
            return None
        return found if isinstance(found, nn.Module) else None

    embedding, head = ask("get_input_embeddings"), ask("get_output_embeddings")
    modules = [(name.rsplit(".", 1)[-1], module) for name, module in model.named_modules()]
    if embedding is None:
        names = ("embed_tokens", "word_embeddings", "wte", "tok_embeddings")
        embedding = next((module for name, module in modules if name in names), None)
    if head is None:
        head = next((module for name, module in modules if name in ("lm_head", "embed_out")), None)
    return (embedding if isinstance(embedding, nn.Embedding) else None), head


def _moe_blocks(structure: Structure, found: Blocks) -> list[MoeBlock]:
    """Modules that own experts: the parent of fused ones, or of a list of MLPs that are all alike."""
    owners: dict[str, int] = {}
    for name, module in structure.modules.items():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and _alike(structure, name, module, found):
            owners[name.rpartition(".")[0]] = len(module)
    for block in found.feed_forward:
        if isinstance(block, FusedExperts):
            owners[block.name.rpartition(".")[0]] = block.experts
    moe = []
    for owner, experts in owners.items():
        if any(_inside(owner, outer) for outer in owners):
            continue  # experts of experts: reached through the outer ones
        inside = [block for block in found.feed_forward if _inside(block.name, owner)]
        terms = tuple(term for block in inside for term in block.terms)
        moe.append(MoeBlock(owner, terms, inside[0].hidden, experts))
    return moe


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _alike(structure: Structure, name: str, members: nn.ModuleList, found: Blocks) -> bool:
    """Whether each member is one MLP and nothing else, and all have the same shapes."""
    blocks = {block.name: block for block in found.feed_forward}
    shapes = set()
    for index, member in enumerate(members):
        prefix = join(name, str(index))
        inside = [block for key, block in blocks.items() if key == prefix or key.startswith(f"{prefix}.")]
        if len(inside) != 1:
            return False
        covered = {lane.parameter for lane in inside[0].lanes} | set(inside[0].once)
        own = {structure.name_of(parameter) for parameter in member.parameters()}
        if own != covered:
            return False
        shapes.add(tuple(tuple(parameter.shape) for parameter in member.parameters()))
    return len(shapes) == 1


def _note_small_parts_of_moe(structure: Structure, found: Blocks) -> None:
    """Routers and the gates of shared experts: every rank needs the whole of them to decide alike."""
    divided = {lane.parameter for block in found.feed_forward for lane in block.lanes}
    for moe in found.moe:
        for name, parameter in structure.parameters.items():
            small = parameter.dim() == 2 and parameter.shape[0] in (1, moe.experts)
            if _inside(name, moe.name) and small and name not in divided:
                found.whole[name] = "router: all ranks route alike"
