"""Small models for tests: real architectures of transformers, a few thousand parameters, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

VOCABULARY = 64
HIDDEN = 32
LAYERS = 2
HEADS = 4
MAX_TOKENS = 64
WEIGHT_DECAY = 0.01
ADAM_EPS = 1e-3
"""Far above rounding: gradients that are zero in theory (the bias of a key projection) must not become whole steps."""


SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
GROUPED_QUERY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
}
"""What the Llama and the Mixtral have in common: two attention heads share a key-value head."""


def tiny_llama(layers: int = LAYERS) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            **GROUPED_QUERY,
            num_hidden_layers=layers,
            max_position_embeddings=MAX_TOKENS,
            **SPECIAL_TOKENS,
        )
    )


def tiny_mixtral(layers: int = LAYERS) -> PreTrainedModel:
    return MixtralForCausalLM(
        MixtralConfig(
            **GROUPED_QUERY,
            num_hidden_layers=layers,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=MAX_TOKENS,
            sliding_window=None,
            **SPECIAL_TOKENS,
        )
    )


def tiny_gpt2(layers: int = LAYERS) -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_layer=layers,
            n_head=HEADS,
            n_positions=MAX_TOKENS,
            # Dropout draws from the generator in an order that offloading may change.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **SPECIAL_TOKENS,
        )
    )


def tiny_opt(layers: int = LAYERS) -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            word_embed_proj_dim=HIDDEN,
            ffn_dim=2 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            max_position_embeddings=MAX_TOKENS,
            dropout=0.0,
            attention_dropout=0.0,
            **SPECIAL_TOKENS,
        )
    )


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "mixtral": tiny_mixtral,
    "gpt2": tiny_gpt2,
    "opt": tiny_opt,
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model ``name`` in eval mode, with weights that depend on ``seed`` alone.

    Weights are spread wider than transformers' 0.02, so that logits differ clearly and greedy choices are no matter
    of rounding.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BUILDERS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
    model.to(dtype=dtype)
    return model.eval()


def token_ids(seed: int, batch: int = 2, length: int = 8) -> torch.Tensor:
    """Random token ids, ``(batch, length)``, none of them the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def zero3_config(
    *, offload: str = "none", lr: float | None = None, gather: str = "collective", **zero_options: Any
) -> dict[str, Any]:
    """A ds_config that makes partitioning real for tiny models: no persistent parameters, small prefetch bucket.

    Ranks ``gather`` parameters together unless told otherwise: by default they read each other's partitions here, and
    most of what there is to go wrong would never run.

    ``offload`` is ``none`` or ``cpu``; ``lr`` adds DeepSpeed's own wrapping of ``torch.optim.AdamW``.
    """
    if offload not in ("none", "cpu"):
        raise ValueError(f"offload: expected none or cpu, got {offload!r}")
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 2_000,
        "stage3_max_live_parameters": 20_000,
        "stage3_max_reuse_distance": 20_000,
        "reduce_bucket_size": 5_000,
        "stage3_gather": gather,
    }
    if offload == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {**zero, **zero_options},
    }
    if lr is not None:
        config["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": lr, "weight_decay": WEIGHT_DECAY, "eps": ADAM_EPS, "torch_adam": True},
        }
    return config
