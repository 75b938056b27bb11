"""Run by each rank of test_from_pretrained: loads a checkpoint, and says how large the process became meanwhile."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.models import build, zero3_config  # noqa: E402

LOOK_EVERY_S = 0.001


def own_bytes() -> int:
    """Resident memory that is this rank's: without pages of files, which the system takes back, and with a part of what
    ranks share."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    private, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return private + shared // torch.distributed.get_world_size()


class Peak:
    """The largest `own_bytes` that a thread sees."""

    def __init__(self) -> None:
        self.before_bytes = own_bytes()
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self.bytes = max(self.bytes, own_bytes())

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.bytes - self.before_bytes


def main() -> None:
    folder, results, device = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if device != "none":
        zero["offload_param"] = {"device": device, "nvme_path": f"{results}/nvme", "pin_memory": False}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    deepspeed.init_distributed("gloo")
    # What is imported and connected at first use is not the model's.
    deepspeed.initialize(model=build("mixtral"), config=zero3_config())[0].destroy()
    build("llama")
    alive = HfDeepSpeedConfig(config)  # makes from_pretrained partition, as long as it lives
    peak = Peak()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model.eval(), config=config)
    figures = {
        "peak_bytes": peak.stop(),
        "model_bytes": sum(p.ds_numel * p.element_size() for p in model.parameters()),
        "largest_bytes": max(p.ds_numel * p.element_size() for p in model.parameters()),
    }
    with torch.no_grad():
        figures["logits"] = engine(torch.arange(8)[None], use_cache=False).logits[0, -1].tolist()
    (Path(results) / f"{os.environ['RANK']}.json").write_text(json.dumps(figures))
    engine.destroy()
    torch.distributed.destroy_process_group()
    del alive


if __name__ == "__main__":
    main()
