"""examples/generate.py and compare_with_plain.py, started as a user starts them, on a small model from a folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", "what", "who", "where", "is", "was", "the", "sea", "poem", "write"]
TEMPLATE = (
    "{% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LIMIT_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Mixtral of random weights, too wide for every parameter to be persistent, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts of unequal length: one rank of two gets two of them."""
    file = tmp_path / "prompts.txt"
    file.write_text("what is the sea\n\nwho was the\nwrite the poem\n")
    return file


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--master_port", str(free_port())]
    command = [*launcher, "--num_accelerators", str(ranks), str(ROOT / "examples/generate.py"), *map(str, arguments)]
    return run(command)


def compare(model: Path, tokens: Path) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "examples/compare_with_plain.py")
    return run([sys.executable, script, "--model", str(model), "--tokens", str(tokens)])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize(("ranks", "offload"), [(1, "none"), (2, "none"), (2, "cpu")])
def test_the_tokens_equal_plain_transformers(
    model: Path, prompts: Path, tmp_path: Path, ranks: int, offload: str
) -> None:
    tokens = tmp_path / "tokens.json"
    options = [
        "--model",
        model,
        "--prompts",
        prompts,
        "--offload",
        offload,
        "--max-new-tokens",
        "8",
        "--output",
        tokens,
    ]
    generated = launch(ranks, *options)
    assert generated.returncode == 0, generated.stdout + generated.stderr
    for rank in range(ranks):
        assert f"rank {rank}: " in generated.stdout
    assert "tokens/s, peak" in generated.stdout

    recorded = json.loads(tokens.read_text())
    given = [prompt for rank in recorded["ranks"] for prompt in rank["prompts"]]
    assert sorted(given) == ["what is the sea", "who was the", "write the poem"]
    compared = compare(model, tokens)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "EQUAL: all 24 tokens equal plain transformers" in compared.stdout

    recorded["ranks"][-1]["tokens"][0][3] += 1
    tokens.write_text(json.dumps(recorded))
    compared = compare(model, tokens)
    assert compared.returncode == 1
    assert f"rank {ranks - 1}, {recorded['ranks'][-1]['prompts'][0]!r}: token 3: expected" in compared.stdout


def test_fewer_prompts_than_ranks_is_an_error_that_says_so(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "one.txt"
    prompts.write_text("what is the sea\n")
    result = launch(2, "--model", model, "--prompts", prompts)
    assert result.returncode != 0
    assert "one.txt: expected at least one prompt for each of 2 ranks, got 1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: no such file"),
        (["--ds-config", "nowhere.json"], "--ds-config nowhere.json: no such file"),
        (["--offload", "nvme"], "--offload nvme needs --nvme-path"),
        (["--offload", "tape"], "invalid choice: 'tape'"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    result = run([sys.executable, str(ROOT / "examples/generate.py"), "--model", "none", *arguments])
    assert result.returncode == 2
    assert message in result.stderr
