"""A mixture of experts that is larger than the memory it may take: built or loaded to NVMe, then 8 tokens generated.

    python switch_on_nvme.py build|load FOLDER EXPERTS LAYERS VOCABULARY CAP_BYTES

With CAP_BYTES above 0 the system refuses more than that beyond the imports. That counts what is mapped, touched or not:
all of a checkpoint, and what glibc keeps of freed memory unless MALLOC_MMAP_THRESHOLD_ is set. ``load`` first saves a
model of the same shape to FOLDER in another process.

Prints one line of JSON: bytes of the model, and the most anonymous memory beyond that of the imports, when it was built
and when it had generated.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import threading
from pathlib import Path

import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
from transformers.integrations import HfDeepSpeedConfig

WIDTH = 768
SAMPLE_S = 0.01
SHARD_SIZE = "200MB"


def anonymous_bytes() -> int:
    """Memory of this process that is not the content of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def cap_memory(cap_bytes: int) -> None:
    """No more than this beyond what is mapped now: writable memory that is not shared, touched or not."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    limit_bytes = int(found[1]) * 1024 + cap_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


class PeakMemory:
    """The most anonymous memory since it was made, beyond what there was then."""

    def __init__(self) -> None:
        self._start_bytes = self._peak_bytes = anonymous_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not threading.Event().wait(SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes())

    @property
    def beyond_start_bytes(self) -> int:
        return self._peak_bytes - self._start_bytes


def switch_config(experts: int, layers: int, vocabulary: int) -> SwitchTransformersConfig:
    return SwitchTransformersConfig(
        vocab_size=vocabulary,
        d_model=WIDTH,
        d_ff=2048,
        num_layers=layers,
        num_decoder_layers=layers,
        num_sparse_encoder_layers=layers // 2,
        num_sparse_decoder_layers=layers // 2,
        num_heads=12,
        num_experts=experts,
        decoder_start_token_id=0,
    )


def ds_config(folder: Path, vocabulary: int) -> dict[str, object]:
    """The embedding is ten times as large as a buffer."""
    offload = {
        "device": "nvme",
        "nvme_path": str(folder),
        "buffer_size": vocabulary * WIDTH // 10,
        "max_in_cpu": 0,
        "pin_memory": False,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "stage3_prefetch_bucket_size": 10_000_000,
            "stage3_max_live_parameters": 120_000_000,
            "stage3_param_persistence_threshold": 0,
        },
    }


def main(mode: str, folder: Path, experts: int, layers: int, vocabulary: int, cap_bytes: int) -> None:
    model_config = switch_config(experts, layers, vocabulary)
    if mode == "save":
        torch.set_default_dtype(torch.bfloat16)
        SwitchTransformersForConditionalGeneration(model_config).save_pretrained(folder, max_shard_size=SHARD_SIZE)
        return
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder

    deepspeed.init_distributed(verbose=False)
    AsyncIOBuilder().load()
    config = ds_config(folder, vocabulary)
    peak = PeakMemory()
    if cap_bytes:
        cap_memory(cap_bytes)
    hf_config = HfDeepSpeedConfig(config)
    if mode == "load":
        model = SwitchTransformersForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = SwitchTransformersForConditionalGeneration(model_config)
    built_bytes = peak.beyond_start_bytes
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.module.eval()
    with torch.no_grad():
        tokens = engine.module.generate(
            input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    assert tokens.shape == (1, 9)
    del hf_config
    model_bytes = sum(p.ds_numel * p.element_size() for p in model.parameters())
    engine.destroy()
    print(json.dumps({"model_bytes": model_bytes, "built_bytes": built_bytes, "peak_bytes": peak.beyond_start_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:7]))
