"""Small models for tests of tensor parallelism: dimensions are several times ``tp_grain_size`` times the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 512
HIDDEN = 192
HEADS = 6
KV_HEADS = 3
HEAD_DIM = 32
INTERMEDIATE = 768
EXPERTS = 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**COMMON, "intermediate_size": INTERMEDIATE, "num_key_value_heads": KV_HEADS}
ROUTED: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": 2}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**GROUPED, **changes}))


def mixtral(**changes: Any) -> PreTrainedModel:
    return MixtralForCausalLM(
        MixtralConfig(**{**GROUPED, "num_local_experts": EXPERTS, "sliding_window": None, **changes})
    )


def qwen2_moe(**changes: Any) -> PreTrainedModel:
    sizes = {"moe_intermediate_size": INTERMEDIATE, "shared_expert_intermediate_size": INTERMEDIATE}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**GROUPED, **ROUTED, **sizes, **changes}))


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    sizes = {"moe_intermediate_size": INTERMEDIATE, "head_dim": HEAD_DIM}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**GROUPED, **ROUTED, **sizes, **changes}))


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    """The first layer is dense; the projections to latents, which stay whole, are small as in the real one."""
    sizes = {
        "num_key_value_heads": HEADS,
        "moe_intermediate_size": INTERMEDIATE,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**GROUPED, **sizes, **changes}))


def gpt_oss(**changes: Any) -> PreTrainedModel:
    """Interleaved gate and up, transposed, biases everywhere, sinks; tokens see at most four others in one layer."""
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": HEAD_DIM, "sliding_window": 4}
    return GptOssForCausalLM(GptOssConfig(**{**GROUPED, **sizes, **changes}))


def olmoe(**changes: Any) -> PreTrainedModel:
    """Norms over the features of all heads together."""
    return OlmoeForCausalLM(OlmoeConfig(**{**GROUPED, **ROUTED, **changes}))


def granite_moe(**changes: Any) -> PreTrainedModel:
    return GraniteMoeForCausalLM(
        GraniteMoeConfig(**{**GROUPED, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, **changes})
    )


def opt(**changes: Any) -> PreTrainedModel:
    """No gates, biases, a tied output layer, embedded positions."""
    sizes = {"ffn_dim": INTERMEDIATE, "word_embed_proj_dim": HIDDEN, "dropout": 0.0, "attention_dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**{**COMMON, **sizes, **changes}))


class Expert(nn.Module):
    """As transformers 4 had Mixtral's: three linear layers with names that say little."""

    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, intermediate, bias=bias)
        self.w2 = nn.Linear(intermediate, hidden, bias=bias)
        self.w3 = nn.Linear(hidden, intermediate, bias=bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(states)) * self.w3(states))


class HandWrittenMoe(nn.Module):
    """Experts in a ModuleList, called only if a token goes there. ``shape``: ``(batch, length, hidden)``.

    ``residual`` adds the block's input inside the block, so that its output is no sum of its experts' outputs.
    """

    def __init__(self, *, bias: bool = False, residual: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(HIDDEN, INTERMEDIATE, bias) for _ in range(EXPERTS))
        self.residual = residual

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        tokens = states.reshape(-1, states.shape[-1])
        weights, chosen = self.gate(tokens).softmax(dim=-1).topk(2, dim=-1)
        out = tokens * 0.1 if self.residual else torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            if token.numel():
                out.index_add_(0, token, expert(tokens[token]) * weights[token, place].unsqueeze(-1))
        return out.view_as(states)


def hand_written(**options: bool) -> PreTrainedModel:
    """A Llama whose MLPs are hand-written MoE blocks."""
    model = llama()
    for layer in model.model.layers:
        layer.mlp = HandWrittenMoe(**options)
    return model


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": llama,
    "opt": opt,
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "qwen3-moe": qwen3_moe,
    "deepseek-v3": deepseek_v3,
    "gpt-oss": gpt_oss,
    "olmoe": olmoe,
    "granite-moe": granite_moe,
    "hand-written": hand_written,
}
MOE_FAMILIES = tuple(name for name in FAMILIES if name not in ("llama", "opt"))


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model in eval mode, the same on every rank. Weights are spread wide, so that greedy choices are no matter of
    rounding, and no bias, norm or sink is trivial.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[family](**changes)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.1)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype=dtype).eval()
