"""`accelerate launch` with a config file: the plugin's own keys, or a ds_config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import test_utils
from transformers import AutoModelForCausalLM

from tests import shared_segments
from tests.comparisons import Tolerance
from tests.integration.accelerate_run import EXAMPLES as COUNT
from tests.integration.launching import LIMIT_S, free_port
from tests.integration.loading import EXAMPLES
from tests.models import ADAM_EPS, build
from tests.trainer_runs import LR, Texts

ROOT = Path(__file__).resolve().parents[2]
CLOSE = Tolerance(rtol=1e-4, atol=1e-4)
RANKS = 2
ACCUMULATION = 2
CLIPPING = 0.5
KEYS = {
    "zero_stage": 3,
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIPPING,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
}


def launch(
    folder: Path, deepspeed_config: dict[str, object], *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run accelerate_run.py on two ranks."""
    file = folder / "accelerate.yaml"
    config = {"distributed_type": "DEEPSPEED", "num_machines": 1, "num_processes": RANKS, "use_cpu": False}
    file.write_text(
        yaml.safe_dump({**config, "compute_environment": "LOCAL_MACHINE", "deepspeed_config": deepspeed_config})
    )
    port = free_port()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--main_process_port", str(port), "-m", "tests.integration.accelerate_run", *map(str, arguments)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    finally:
        shared_segments.remove(shared_segments.named_after([port]))


def with_a_ds_config(folder: Path) -> dict[str, object]:
    config = json.loads((EXAMPLES / "ds_config_train_zero3.json").read_text())
    config |= {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIPPING}
    del config["bf16"]
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config))
    return {"deepspeed_config_file": str(file), "zero3_init_flag": True}


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["of the plugin", "of a ds_config"])
def test_the_documented_loop_equals_plain_torch(keys: str, tmp_path: Path) -> None:
    plain = build("llama").train()
    plain.save_pretrained(tmp_path / "model")
    config = KEYS if keys == "of the plugin" else with_a_ds_config(tmp_path)
    output = tmp_path / "output"
    launched = launch(tmp_path, config, "loop", tmp_path / "model", output)
    assert launched.returncode == 0, launched.stdout + launched.stderr

    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=ADAM_EPS)
    expected = []
    for index in range(COUNT):
        loss = plain(**{name: value[None] for name, value in Texts(COUNT)[index].items()}).loss
        (loss / (RANKS * ACCUMULATION)).backward()
        expected.append(loss.item())
        if (index + 1) % (RANKS * ACCUMULATION) == 0:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
    CLOSE.check(torch.tensor(json.loads((output / "losses.json").read_text())), torch.tensor(expected), "loss")
    saved = dict(AutoModelForCausalLM.from_pretrained(output).named_parameters())
    for name, parameter in plain.named_parameters():
        CLOSE.check(saved[name].data, parameter.data, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_ops.py", "test_script.py"])
def test_a_script_that_comes_with_accelerate(name: str, tmp_path: Path) -> None:
    path = Path(test_utils.__file__).parent / "scripts" / name
    launched = launch(tmp_path, {**KEYS, "gradient_accumulation_steps": 1}, "script", path)
    assert launched.returncode == 0, launched.stdout + launched.stderr
