"""Tensor-parallel inference on gloo: what ranks hold, and what comes out, against the same model in one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.tensor_parallel.collectives import TensorParallelGroup
from torch import nn

from tests import tensor_parallel_models as models
from tests.comparisons import Tolerance
from tests.harness import distributed
from tests.tensor_parallel_models import EXPERTS, FAMILIES, MOE_FAMILIES, VOCABULARY, HandWrittenMoe, build

FP32 = Tolerance(rtol=1e-3, atol=1e-3)
"""Partial sums are added in another order; logits are of the order of 10."""
BF16_DISTANCE = 0.05
"""Distance of a token's logits, relative to their norm, for half of the tokens: one near a tie may go to another
expert, and changes those after it.
"""
SHARE_LIMIT = 1.1
NEW_TOKENS = 6


def ids(batch: int = 2, length: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def divide(model: nn.Module, ranks: int, **options: Any) -> InferenceEngine:
    """An engine over a copy of ``model``."""
    tensor_parallel = {"tp_size": ranks, **options.pop("tensor_parallel", {})}
    dtype = options.pop("dtype", torch.float32)
    return deepspeed.init_inference(copy.deepcopy(model), tensor_parallel=tensor_parallel, dtype=dtype, **options)


def logits(model: nn.Module, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, **inputs).logits


def everyones(number: int) -> list[int]:
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, number)
    return rows


def assert_even(engine: InferenceEngine, whole: nn.Module) -> None:
    """Each rank holds its share of all parameters: by what it really holds, in elements and in bytes."""
    total = sum(parameter.numel() for parameter in whole.parameters())
    mine = list(engine.module.parameters())
    numels = everyones(sum(parameter.numel() for parameter in mine))
    item = mine[0].element_size()
    kept_bytes = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes() for parameter in mine}
    ranks = len(numels)
    assert sum(kept_bytes.values()) == item * numels[dist.get_rank()]
    assert max(numels) <= SHARE_LIMIT * total / ranks, numels
    assert max(numels) <= SHARE_LIMIT * min(numels), numels
    assert engine.plan is not None
    # A bias that one rank adds for all is not there on the others.
    once = [parameter for name, parameter in whole.named_parameters() if name in engine.plan.once]
    assert engine.plan.rank_numels()[dist.get_rank()] - numels[dist.get_rank()] <= sum(p.numel() for p in once)


@distributed(world_size=(2, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_it_does_in_one_process(family: str, world_size: int) -> None:
    whole = build(family)
    engine = divide(whole, world_size)
    assert_even(engine, whole)
    FP32.check(logits(engine, ids()), logits(whole, ids()), "logits")
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    assert torch.equal(engine.generate(input_ids=ids(), **greedy), whole.generate(input_ids=ids(), **greedy))


@distributed(world_size=(2, 3))
def test_bf16(world_size: int) -> None:
    for family in FAMILIES:
        whole = build(family)
        engine = divide(whole, world_size, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
        expected = logits(whole.bfloat16(), ids()).float()
        distances = (logits(engine, ids()).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert distances.median() <= BF16_DISTANCE, family


@distributed(world_size=2)
def test_each_implementation_of_experts_and_attention(world_size: int) -> None:
    for family in ("mixtral", "gpt-oss", "deepseek-v3"):
        whole = build(family)
        engine = divide(whole, world_size)
        for experts, attention in (("eager", "sdpa"), ("batched_mm", "eager"), ("grouped_mm", "eager")):
            for model in (whole, engine.module):
                model.set_experts_implementation(experts)
                # transformers has no sinks in the attention of torch.
                model.set_attn_implementation("eager" if family == "gpt-oss" else attention)
            FP32.check(logits(engine, ids()), logits(whole, ids()), f"logits of {family}, {experts}, {attention}")


HEADS = [(6, 1), (3, 3), (6, 2), (4, 2)]


@distributed(world_size=(2, 3))
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads_that_do_not_divide(heads: int, kv_heads: int, world_size: int) -> None:
    """C25, with both kinds of caches: their key-value heads are the rank's own."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 32}
    whole = build("llama" if kv_heads == 1 else "qwen3-moe", **changes)
    engine = divide(whole, world_size)
    assert_even(engine, whole)
    FP32.check(logits(engine, ids()), logits(whole, ids()), "logits")
    for cache in ("dynamic", "static"):
        greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "cache_implementation": cache}
        assert torch.equal(engine.generate(input_ids=ids(), **greedy), whole.generate(input_ids=ids(), **greedy))


@distributed(world_size=2)
@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_is_divided_and_logits_are_whole(tied: bool, world_size: int) -> None:
    whole = build("llama", tie_word_embeddings=tied, vocab_size=333)
    engine = divide(whole, world_size)
    tokens = ids() % 333
    embedding, head = engine.module.get_input_embeddings(), engine.module.get_output_embeddings()
    assert (embedding.weight is head.weight) == tied
    assert max(everyones(embedding.weight.shape[0])) < 200
    assert max(everyones(head.weight.shape[0])) < 200
    FP32.check(logits(engine, tokens), logits(whole, tokens), "logits")


@distributed(world_size=2)
def test_generate_with_padding_sampling_and_without_cache(rank: int, world_size: int) -> None:
    whole = build("mixtral")
    engine = divide(whole, world_size)
    tokens = ids(batch=3)
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1, :5] = 0, 0
    padded = {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask, "max_new_tokens": NEW_TOKENS}
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        mine = engine.generate(**padded, do_sample=False, **options)
        assert torch.equal(mine, whole.generate(**padded, do_sample=False, **options)), options
    torch.manual_seed(5)
    drawn = engine.generate(**padded, do_sample=True, temperature=2.0)
    torch.manual_seed(5)
    assert torch.equal(drawn, whole.generate(**padded, do_sample=True, temperature=2.0))
    assert not torch.equal(drawn, mine)


@distributed(world_size=2)
def test_sampling_starts_alike_on_all_ranks(rank: int, world_size: int) -> None:
    """Random state differs before init_inference, and is rank 0's after it."""
    torch.manual_seed(rank)
    engine = divide(build("llama"), world_size)
    drawn = engine.generate(input_ids=ids(), do_sample=True, temperature=3.0, max_new_tokens=NEW_TOKENS)
    rows: list[Any] = [None] * world_size
    dist.all_gather_object(rows, drawn.tolist())
    assert rows[0] == rows[1]


def count_sums(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> int:
    counted = []
    real = TensorParallelGroup.add_up

    def add_up(self: TensorParallelGroup, tensor: torch.Tensor) -> torch.Tensor:
        counted.append(tuple(tensor.shape))
        return real(self, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(TensorParallelGroup, "add_up", add_up)
        run()
    return len(counted)


@distributed(world_size=2)
def test_one_sum_for_each_moe_block(world_size: int) -> None:
    """Shared experts included: two for each layer, and one for the embedding."""
    for family in MOE_FAMILIES:
        engine = divide(build(family), world_size)
        layers = engine.module.config.num_hidden_layers
        with pytest.MonkeyPatch.context() as monkeypatch:
            assert count_sums(monkeypatch, lambda: logits(engine, ids())) == 2 * layers + 1, family  # noqa: B023


@distributed(world_size=(2, 3))
@pytest.mark.parametrize("options", [{"bias": True}, {"residual": True}, {"bias": True, "residual": True}])
def test_hand_written_blocks_that_add_more_than_their_experts(options: dict[str, bool], world_size: int) -> None:
    whole = build("hand-written", **options)
    engine = divide(whole, world_size)
    assert_even(engine, whole)
    FP32.check(logits(engine, ids()), logits(whole, ids()), "logits")
    with pytest.MonkeyPatch.context() as monkeypatch:
        sums = count_sums(monkeypatch, lambda: logits(engine, ids(batch=4)))
    layers = len(engine.module.model.layers)
    if options.get("residual"):
        assert sums > 2 * layers + 1, "the block's own term would be counted once for each rank"
        assert sums <= (1 + EXPERTS) * layers + 1
    else:
        assert sums == 2 * layers + 1


@distributed(world_size=2)
def test_hooks_come_off(world_size: int) -> None:
    """Afterwards a forward meets no other rank: rank 1 runs alone."""
    engine = divide(build("mixtral"), world_size)
    hooked = [name for name, module in engine.module.named_modules() if module._forward_hooks]
    assert hooked
    engine.destroy()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.module.modules())
    if dist.get_rank() == 1:
        logits(engine.module, ids() % 64)


# ---- what is not divided, and how that is said ----


class Unknown(nn.Module):
    """Layers in an order that no name tells: an attention, or an MLP, or neither."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(width, width), "b": nn.Linear(width, width)})])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer["b"](torch.relu(layer["a"](states)))
        return states


class Pair(nn.ModuleDict):
    """So that a policy can name it."""


@distributed(world_size=2)
def test_a_model_that_would_stay_whole_is_refused(world_size: int) -> None:
    model = build("llama", num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1, intermediate_size=64)
    with pytest.raises(ValueError, match=r"(?s)tp_size=2, but only .* injection_policy=\{"):
        divide(model, world_size)


@distributed(world_size=2)
def test_a_declared_layer_is_divided(world_size: int) -> None:
    torch.manual_seed(0)
    model = Unknown()
    model.layers[0] = Pair(dict(model.layers[0].items()))
    engine = divide(model, world_size, injection_policy={Pair: ("b",)})
    assert engine.module.layers[0]["a"].weight.shape == (128, 256)
    assert engine.module.layers[0]["b"].weight.shape == (256, 128)
    states = torch.randn(3, 256)
    with torch.no_grad():
        FP32.check(engine(states), model(states), "output")


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("family", "why"),
    [("mixtral", "there is no policy for MixtralForCausalLM"), ("llama", "this machine cannot run the kernels")],
)
def test_the_reported_call(family: str, why: str, world_size: int) -> None:
    """Old spellings, and kernels that there are none of: one warning says what happens instead."""
    whole = build(family)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = deepspeed.utils.logger
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        engine = deepspeed.init_inference(
            copy.deepcopy(whole),
            mp_size=world_size,
            dtype=torch.float32,
            replace_method="auto",
            replace_with_kernel_inject=True,
        )
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert_even(engine, whole)
    FP32.check(logits(engine, ids()), logits(whole, ids()), "logits")
    said = [record for record in records if "no kernels are injected" in record]
    assert len(said) == 1 and why in said[0]
    assert sum("mp_size is deprecated" in record for record in records) == 1
    if dist.get_rank() == 0:
        assert sum("Tensor parallelism over 2 ranks" in record for record in records) == 1


@distributed(world_size=2)
def test_an_architecture_of_the_bases_own_still_goes_its_way(world_size: int) -> None:
    """GPT-NeoX has query, key and value in one matrix: the base's AutoTP divides it."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    whole = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, **sizes)).eval()
    engine = divide(whole, world_size)
    assert engine.plan is None
    FP32.check(logits(engine, ids()), logits(whole, ids()), "logits")


@distributed(world_size=2)
def test_one_group_for_each_model(world_size: int) -> None:
    """tp_size smaller than the world: each rank has the whole model, and no other rank is waited for."""
    whole = build("llama")
    engine = divide(whole, 1)
    if dist.get_rank() == 1:
        FP32.check(logits(engine, ids()), logits(whole, ids()), "logits")
    with pytest.raises(ValueError, match="expected a number of ranks that is a multiple of it, got 2"):
        divide(whole, 3)


# ---- inputs ----


@distributed(world_size=3)
@pytest.mark.parametrize("what", ["values", "shapes", "mask"])
def test_different_inputs_are_an_error_that_names_the_rank(what: str, rank: int, world_size: int) -> None:
    whole = build("llama")
    engine = divide(whole, world_size)
    inputs: dict[str, Any] = {"input_ids": ids(), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    odd = dict(inputs)
    if rank == 1:
        if what == "values":
            odd["input_ids"] = ids(seed=1)
        elif what == "shapes":
            odd = {"input_ids": ids(length=5)}
        else:
            odd["attention_mask"] = inputs["attention_mask"].clone().index_fill_(1, torch.tensor([0]), 0)
    with pytest.raises(RuntimeError, match=r"those of rank 1 differ from those of rank 0.*'inputs': 'broadcast'"):
        engine(**odd)
    with torch.no_grad():
        FP32.check(engine(**inputs).logits, whole(**inputs).logits, "logits afterwards")


@distributed(world_size=2)
def test_inputs_of_rank_0_are_taken_when_asked_for(rank: int, world_size: int) -> None:
    whole = build("llama")
    engine = divide(whole, world_size, tensor_parallel={"inputs": "broadcast"})
    FP32.check(logits(engine, ids(seed=rank, length=8 - rank)), logits(whole, ids(seed=0)), "logits")
    torch.manual_seed(rank)
    options = {"do_sample": True, "temperature": 2.0, "max_new_tokens": NEW_TOKENS}
    drawn = engine.generate(input_ids=ids(seed=rank), **options)
    torch.manual_seed(0)
    assert torch.equal(drawn, whole.generate(input_ids=ids(seed=0), **options))


@distributed(world_size=2)
def test_ranks_that_draw_apart_are_noticed(rank: int, world_size: int) -> None:
    engine = divide(build("llama"), world_size)
    torch.manual_seed(rank)
    with pytest.raises(RuntimeError, match="the same seed before sampling"):
        engine.generate(input_ids=ids(), do_sample=True, temperature=5.0, max_new_tokens=32)


def test_a_process_by_itself_is_told_how_to_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        divide(models.llama(), 2)


def test_hand_written_block_is_what_it_says() -> None:
    """The model under test is itself a sum over chosen experts."""
    torch.manual_seed(0)
    block = HandWrittenMoe()
    states = torch.randn(1, 5, models.HIDDEN)
    weights, chosen = block.gate(states[0]).softmax(dim=-1).topk(2, dim=-1)
    expected = torch.stack(
        [
            sum(weights[token, k] * block.experts[int(chosen[token, k])](states[0, token]) for k in range(2))
            for token in range(5)
        ]
    )
    torch.testing.assert_close(block(states)[0], expected)


# ---- training, which is the base's ----


@distributed(world_size=2)
def test_training_with_the_bases_autotp_goes_on_as_before(world_size: int) -> None:
    """The sum of partial outputs under autograd, two steps of SGD: losses equal those of plain torch."""
    plain = build("llama").train()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "tensor_parallel": {"autotp_size": world_size},
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
    }
    model = deepspeed.tp_model_init(copy.deepcopy(plain), tp_size=world_size, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        tokens = ids(seed=step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        expected = plain(input_ids=tokens, labels=tokens).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        FP32.check(loss.detach(), expected.detach(), f"loss of step {step}")
