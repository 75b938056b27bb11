"""Report: ``init_inference`` does not shard Mixtral: each rank holds the complete model.

The models are small, but their dimensions are several times ``tp_grain_size`` (64) times the number of ranks, so that
every matrix can be split evenly.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import deepspeed
import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.comparisons import Tolerance
from tests.harness import distributed
from tests.models import VOCABULARY, token_ids

HIDDEN = 256
HEADS = 4
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LOGITS = Tolerance(rtol=1e-4, atol=1e-4)
"""The partial sums of a split matrix are added in another order."""
SHARE_LIMIT = 1.1


def llama(kv_heads: int = HEADS) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON, intermediate_size=512, num_key_value_heads=kv_heads))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(
        MixtralConfig(
            **COMMON, intermediate_size=512, num_key_value_heads=HEADS, num_local_experts=4, sliding_window=None
        )
    )


def qwen2_moe() -> PreTrainedModel:
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **COMMON,
            intermediate_size=512,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_key_value_heads=HEADS,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON,
            intermediate_size=512,
            moe_intermediate_size=512,
            num_key_value_heads=HEADS,
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def deepseek_v3() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **COMMON,
            intermediate_size=512,
            moe_intermediate_size=512,
            num_key_value_heads=HEADS,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            kv_lora_rank=128,
            q_lora_rank=128,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
        )
    )


MOE_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "qwen3-moe": qwen3_moe,
    "deepseek-v3": deepseek_v3,
}


def seeded_model(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return build().eval()


def shard(model: PreTrainedModel, world_size: int, kernel_injection: bool) -> nn.Module:
    """The reported call, with today's name for ``mp_size``."""
    engine = deepspeed.init_inference(
        copy.deepcopy(model),
        tensor_parallel={"tp_size": world_size},
        dtype=torch.float32,
        replace_with_kernel_inject=kernel_injection,
    )
    return engine.module


def shardable_numel(model: nn.Module) -> int:
    """Elements of the decoder layers' matrices, routers excepted: each rank needs those whole."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if re.search(r"\blayers\.\d+\.", name)
        and parameter.dim() >= 2
        and not re.search(r"\b(gate|router)\.weight$", name)
    )


def assert_each_rank_holds_its_share(sharded: nn.Module, whole: nn.Module, world_size: int) -> None:
    mine = torch.tensor([shardable_numel(sharded)])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(everyone, mine)
    numels = [int(n.item()) for n in everyone]
    total = shardable_numel(whole)
    shares = ", ".join(f"{numel / total:.3f}" for numel in numels)
    assert max(numels) <= SHARE_LIMIT * total / world_size, f"the ranks hold {shares} of the shardable elements"
    assert max(numels) <= SHARE_LIMIT * min(numels), f"the ranks hold {shares} of the shardable elements"


def assert_same_logits(sharded: nn.Module, whole: PreTrainedModel) -> None:
    ids = token_ids(seed=0)
    with torch.no_grad():
        LOGITS.check(sharded(input_ids=ids).logits, whole(input_ids=ids).logits, "logits")


@distributed(world_size=2)
def test_llama_is_sharded(world_size: int) -> None:
    whole = seeded_model(llama)
    sharded = shard(whole, world_size, kernel_injection=False)
    assert_each_rank_holds_its_share(sharded, whole, world_size)
    assert_same_logits(sharded, whole)


@distributed(world_size=2)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_moe_logits_equal_the_whole_model(family: str, world_size: int) -> None:
    whole = seeded_model(MOE_FAMILIES[family])
    assert_same_logits(shard(whole, world_size, kernel_injection=False), whole)


@distributed(world_size=2)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_moe_is_sharded(family: str, world_size: int) -> None:
    whole = seeded_model(MOE_FAMILIES[family])
    assert_each_rank_holds_its_share(shard(whole, world_size, kernel_injection=False), whole, world_size)


@distributed(world_size=2)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_moe_is_sharded_with_kernel_injection(family: str, world_size: int) -> None:
    whole = seeded_model(MOE_FAMILIES[family])
    assert_each_rank_holds_its_share(shard(whole, world_size, kernel_injection=True), whole, world_size)


@distributed(world_size=2)
def test_one_kv_head_on_two_ranks(world_size: int) -> None:
    whole = seeded_model(lambda: llama(kv_heads=1))
    sharded = shard(whole, world_size, kernel_injection=False)
    assert_each_rank_holds_its_share(sharded, whole, world_size)
    assert_same_logits(sharded, whole)
