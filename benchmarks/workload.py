"""The models that the cases run, and the ZeRO-3 engine around them.

Only what every release of DeepSpeed since 0.19.8 offers is used here, because both environments run this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PretrainedConfig

SEED = 20
HEAD_DIM = 32


@contextmanager
def process_group() -> Iterator[None]:
    """The gloo group of this run's ranks.

    The ranks leave it together, for rank 0 serves the store that the others talk to. After an error they do not: the
    other ranks may never come, and ending them is the launcher's business.
    """
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    yield
    dist.barrier()
    dist.destroy_process_group()


def llama(layers: int, hidden: int, vocabulary: int = 1024) -> LlamaConfig:
    """A Llama with the published models' proportions of MLP and grouped attention heads."""
    return LlamaConfig(vocab_size=vocabulary, **_decoder_sizes(layers, hidden))


def mixtral(layers: int, hidden: int, experts: int = 4, vocabulary: int = 1024) -> MixtralConfig:
    """A Mixtral whose tokens visit two of the experts."""
    return MixtralConfig(
        vocab_size=vocabulary, num_local_experts=experts, num_experts_per_tok=2, **_decoder_sizes(layers, hidden)
    )


def build(config: PretrainedConfig) -> Any:
    """The model of a configuration, with the same fp32 weights on every call and on every rank."""
    torch.manual_seed(SEED)
    model_type = {LlamaConfig: LlamaForCausalLM, MixtralConfig: MixtralForCausalLM}[type(config)]
    return model_type(config)


def load(folder: Path) -> Any:
    """The fp32 Llama of a checkpoint; partitioned while it is loaded where an `HfDeepSpeedConfig` of stage 3 lives."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def zero3_config(
    micro_batch: int = 1, learning_rate: float | None = None, gather: str | None = None, **zero: Any
) -> dict[str, Any]:
    """A ds_config of stage 3 that partitions every parameter; with an optimizer where a learning rate is given.

    ``gather`` is ``stage3_gather``, left out where DeepSpeed does not know the key.

    Clipping is off, since plain torch does not clip, and the persistence threshold is 0, since the default would
    leave models as small as these whole.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    if gather is not None and "stage3_gather" in DeepSpeedZeroConfig.model_fields:
        config["zero_optimization"]["stage3_gather"] = gather
    if learning_rate is not None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": learning_rate, "torch_adam": True}}
        config["zero_allow_untested_optimizer"] = True
    return config


def zero3_engine(model: torch.nn.Module, config: dict[str, Any]) -> Any:
    """The engine that `deepspeed.initialize` makes of a model and a ds_config."""
    parameters = list(model.parameters()) if "optimizer" in config else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


def require_close(what: str, plain: torch.Tensor, zero: torch.Tensor) -> None:
    """Raises `RuntimeError` where ZeRO-3 computes something else than plain torch: its speed would mean nothing."""
    if plain.shape != zero.shape or not torch.allclose(plain.float(), zero.float(), rtol=1e-4, atol=1e-5):
        difference = (plain - zero).abs().max().item() if plain.shape == zero.shape else float("nan")
        raise RuntimeError(
            f"{what}: ZeRO-3 differs from plain torch, so there is nothing to measure; shapes {tuple(plain.shape)} "
            f"and {tuple(zero.shape)}, largest difference {difference:.3g}"
        )


def _decoder_sizes(layers: int, hidden: int) -> dict[str, Any]:
    heads = hidden // HEAD_DIM
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
