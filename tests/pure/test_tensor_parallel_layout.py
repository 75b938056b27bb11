"""Plans of tensor parallelism, without a process group: models on the meta device, sizes and spans as numbers."""

from __future__ import annotations

import pytest
import torch
from deepspeed.module_inject.tensor_parallel.balance import divide, grain_that_fits, heads_by_group, in_grains
from deepspeed.module_inject.tensor_parallel.layout import BALANCED, Plan, plan
from deepspeed.module_inject.tensor_parallel.report import LEAST_SHARE, refusal, summary
from deepspeed.module_inject.tensor_parallel.roles import declared_roles, planned_roles
from deepspeed.module_inject.tensor_parallel.split import Split
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests import tensor_parallel_models as models

GRAIN = 64


def plan_of(model: nn.Module, ranks: int, grain: int = GRAIN) -> Plan:
    return plan(model, ranks, grain, planned_roles(model))


def on_meta(family: str, **changes: object) -> nn.Module:
    with torch.device("meta"):
        return models.FAMILIES[family](**changes)


def covered(split: Split, size: int) -> bool:
    """Whether each index of the dimension is on some rank."""
    held = {index for spans in split.spans for start, stop in spans for index in range(start, stop)}
    return held == set(range(size))


@given(st.integers(0, 200), st.lists(st.floats(-5, 1000), min_size=1, max_size=8))
def test_units_are_given_out_completely_and_to_everybody(extra: int, needs: list[float]) -> None:
    units = len(needs) + extra
    parts = divide(units, needs)
    assert sum(parts) == units
    assert min(parts) >= 1


def test_units_follow_the_needs() -> None:
    assert divide(12, [1.0, 2.0, 3.0]) == [2, 4, 6]
    assert divide(3, [1.0, 1.0]) == [2, 1]
    assert divide(3, [1.0, 1.1]) == [1, 2]
    with pytest.raises(ValueError, match="2 units cannot give 3 parts"):
        divide(2, [1.0, 1.0, 1.0])


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.data())
def test_heads_have_the_key_value_head_that_they_use(
    kv_heads: int, group: int, ranks: int, data: st.DataObject
) -> None:
    heads = kv_heads * group
    needs = data.draw(st.lists(st.floats(0, 100), min_size=ranks, max_size=ranks))
    if heads < ranks:
        with pytest.raises(ValueError, match="cannot be divided"):
            heads_by_group(heads, kv_heads, needs)
        return
    spans = heads_by_group(heads, kv_heads, needs)
    held = sorted(head for (start, stop), _ in spans for head in range(start, stop))
    assert held == list(range(heads))
    for (start, stop), (kv_start, kv_stop) in spans:
        repeats = (stop - start) // (kv_stop - kv_start)
        assert stop > start
        for head in range(start, stop):
            # The model repeats each local key-value head so many times.
            assert kv_start + (head - start) // repeats == head // group


@given(st.integers(1, 3000), st.integers(1, 6), st.sampled_from([1, 8, 64, 100]))
def test_spans_of_grains_cover_a_length(length: int, ranks: int, grain: int) -> None:
    if length < ranks:
        return
    fitting = grain_that_fits(length, ranks, grain)
    spans = in_grains(length, [1.0] * ranks, fitting)
    assert spans[0][0] == 0 and spans[-1][1] == length
    assert all(before[1] == after[0] for before, after in zip(spans, spans[1:]))
    assert all(start < stop and start % fitting == 0 for start, stop in spans)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_matrix_is_divided_evenly(family: str, ranks: int) -> None:
    model = on_meta(family)
    layout = plan_of(model, ranks)
    numels = layout.rank_numels()
    assert not layout.unsplit
    assert max(numels) <= BALANCED * layout.total_numel / ranks
    assert max(numels) <= BALANCED * min(numels)
    for name, split in layout.splits.items():
        assert covered(split, layout.shapes[name][split.dim]), name


def test_a_gate_stays_with_its_up_projection() -> None:
    """Concatenated: the same columns of both halves. Interleaved: pairs."""
    intermediate = models.INTERMEDIATE
    concatenated = plan_of(on_meta("mixtral"), 2).splits["model.layers.0.mlp.experts.gate_up_proj"]
    assert concatenated.dim == 1
    for gate, up in concatenated.spans:
        assert (gate[0] + intermediate, gate[1] + intermediate) == up
    interleaved = plan_of(on_meta("gpt-oss"), 2).splits["model.layers.0.mlp.experts.gate_up_proj"]
    assert interleaved.dim == 2
    assert all(len(spans) == 1 and spans[0][0] % 2 == 0 and spans[0][1] % 2 == 0 for spans in interleaved.spans)


def test_grains_are_kept_while_ranks_are_balanced() -> None:
    layout = plan_of(on_meta("llama", intermediate_size=1000), 2, grain=64)
    ((_, stop),), _ = layout.splits["model.layers.0.mlp.down_proj.weight"].spans
    assert layout.grain == 64
    assert stop % 64 == 0


def test_no_rank_is_empty_without_a_word() -> None:
    layout = plan_of(on_meta("llama", intermediate_size=100), 3, grain=64)
    split = layout.splits["model.layers.0.mlp.down_proj.weight"]
    assert min(split.size(rank) for rank in range(3)) > 0
    assert any("instead of tp_grain_size=64" in note for note in layout.notes)
    (note,) = plan_of(nn.Sequential(models.Expert(256, 100, bias=False)), 3, grain=8 * 64).notes[-1:]
    assert "0: 100 units do not give 3 ranks" in note


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 1, 2), (3, 3, 2), (6, 2, 4), (8, 2, 3), (6, 3, 4)])
def test_heads_that_do_not_divide_are_made_up_for(heads: int, kv_heads: int, ranks: int) -> None:
    """C25: what one rank has more of in attention, it has less of elsewhere."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 32}
    layout = plan_of(on_meta("llama", **changes), ranks)
    numels = layout.rank_numels()
    assert not layout.unsplit
    assert max(numels) <= BALANCED * min(numels)
    assert max(numels) <= BALANCED * layout.total_numel / ranks


def test_fewer_heads_than_ranks_stay_whole_with_a_reason() -> None:
    changes = {"num_attention_heads": 2, "num_key_value_heads": 2}
    layout = plan_of(on_meta("llama", **changes), 3)
    assert layout.unsplit["model.layers.0.self_attn.q_proj.weight"] == "2 heads for 3 ranks"
    assert layout.split_share < LEAST_SHARE


def test_latent_projections_and_routers_stay_whole_on_purpose() -> None:
    layout = plan_of(on_meta("deepseek-v3"), 2)
    assert "latent" in layout.whole["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert "router" in layout.whole["model.layers.1.mlp.gate.weight"]
    assert layout.split_share == 1.0


class Scorer(nn.Module):
    """Query, key, value and output by names of its own."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.ask = nn.Linear(width, width)
        self.offer = nn.Linear(width, width)
        self.give = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)


class Normed(nn.Module):
    """An MLP with a norm over what is between its layers: partial columns would be normed wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(256, 512)
        self.norm = nn.LayerNorm(512)
        self.fc2 = nn.Linear(512, 256)


class NormedAttention(Scorer):
    """Layers of known names, and a norm of nobody knows what."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = self.ask, self.offer, self.give, self.mix
        del self.ask, self.offer, self.give, self.mix
        self.norm = nn.LayerNorm(256)


def test_what_is_not_understood_stays_whole() -> None:
    assert not plan_of(nn.Sequential(NormedAttention()), 2).splits
    # Told that the last layer is ROW, but not how many heads there are: no MLP either.
    scorer = nn.Sequential(Scorer())
    del scorer[0].num_heads
    assert not plan(scorer, 2, GRAIN, declared_roles(scorer, {Scorer: "mix"})).splits
    layout = plan_of(nn.Sequential(Scorer(), Normed()), 2)
    assert not layout.splits
    assert layout.split_share == 0.0
    assert "Linear '0.ask' is in no pattern that is known" in layout.unsplit["0.ask.weight"]
    text = refusal(layout.split_share, 2, list(layout.unsplit.items()))
    for expected in ("tp_size=2", "0.0 %", "0.ask.weight", "1.fc2.weight", "injection_policy={"):
        assert expected in text


def test_a_parameter_of_two_blocks_stays_whole() -> None:
    """Each would cut it in its own way."""
    one, other = models.Expert(256, 512, bias=False), models.Expert(256, 512, bias=False)
    assert len(plan_of(nn.Sequential(one, other), 2).splits) == 6
    other.w2.weight = one.w2.weight
    layout = plan_of(nn.Sequential(one, other), 2)
    assert not layout.splits


def test_a_declaration_divides_what_names_do_not_tell() -> None:
    model = nn.Sequential(Scorer())
    layout = plan(model, 2, GRAIN, declared_roles(model, {Scorer: "mix"}))
    assert not layout.unsplit
    assert layout.splits["0.mix.weight"] == Split(1, (((0, 128),), ((128, 256),)))
    assert layout.splits["0.offer.bias"] == Split(0, (((0, 128),), ((128, 256),)))
    assert ("0", "num_heads", (2, 2)) in [(size.module, size.name, size.values) for size in layout.sizes]


def test_a_declaration_that_fits_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="Scorer has no module whose name ends in 'mx'"):
        declared_roles(nn.Sequential(Scorer()), {Scorer: ("mx",)})
    with pytest.raises(ValueError, match="expected classes of modules"):
        declared_roles(nn.Sequential(Scorer()), {"Scorer": "mix"})  # type: ignore[dict-item]


def test_transformers_plan_tells_how_experts_are_packed() -> None:
    """Llama 4's experts say nothing themselves; without the plan they are left alone."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **{**models.GROUPED, "num_local_experts": 4, "head_dim": 32, "intermediate_size_mlp": 768}
    )
    with torch.device("meta"):
        model = Llama4ForCausalLM(config)
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    assert name in plan_of(model, 2).splits
    assert name in plan(model, 2, GRAIN, {}).unsplit


def test_the_summary_has_parameters_and_bytes_of_each_rank() -> None:
    layout = plan_of(on_meta("llama"), 2)
    text = summary(layout, 2, None)
    for numel in layout.rank_numels():
        assert f"{numel:,} ({numel * 2 / 1e6:,.1f} MB)" in text
    assert "over 2 ranks" in text and "100.0 % of what can be divided" in text
