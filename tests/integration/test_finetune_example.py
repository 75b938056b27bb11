"""examples/finetune_trainer.py and compare_losses.py on a small model: as a user starts them, and in parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.integration.launching import launch
from tests.integration.loading import EXAMPLES, load_example
from tests.trainer_runs import forget_earlier_trainers

WORDS = ["<pad>", "<eos>", "the", "sea", "is", "wide", "and", "deep"]
BLOCK = 6
STEPS = 3


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    return load_example("finetune_trainer")


@pytest.fixture(scope="module")
def compare_losses() -> ModuleType:
    return load_example("compare_losses")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of random weights, too wide for every parameter to be persistent, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(WORDS[2 + index * index % 6] for index in range(40 * BLOCK)))
    return file


def arguments(model: Path, text: Path, output: Path) -> list[str]:
    given = {"model": model, "text": text, "output_dir": output, "block_tokens": BLOCK, "max_steps": STEPS}
    given |= {"per_device_eval_batch_size": 1, "save_strategy": "no", "learning_rate": 1e-2}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + ["--use_cpu"]


def test_two_ranks_under_the_launcher_equal_plain_python(
    finetune: ModuleType,
    compare_losses: ModuleType,
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, zero3 = tmp_path / "plain", tmp_path / "zero3"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["x", *arguments(model, text, plain), "--per_device_train_batch_size", "4"])
        finetune.main()
        forget_earlier_trainers()
    options = [
        "--per_device_train_batch_size",
        "2",
        "--deepspeed",
        EXAMPLES / "ds_config_train_zero3.json",
        "--save_model",
    ]
    trained = launch(2, *arguments(model, text, zero3), *options, example="finetune_trainer.py")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "'loss'" in trained.stdout
    assert trained.stdout.count("perplexity ") == 1
    for folder in (plain, zero3):
        assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["x", str(plain / "losses.json"), str(zero3 / "losses.json")])
        assert compare_losses.main() == 0
    assert f"EQUAL: all {STEPS + 1} losses" in capsys.readouterr().out
    saved = AutoModelForCausalLM.from_pretrained(zero3)
    assert not torch.equal(saved.lm_head.weight, AutoModelForCausalLM.from_pretrained(model).lm_head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["smollm2", "smollm2-moe"])
def test_20_steps_of_a_real_model_equal_plain_python(
    name: str, ranks: int, finetune: ModuleType, compare_losses: ModuleType, tmp_path: Path
) -> None:
    """What `make demo-train` does, for longer, with the dense model and with the mixture made from it."""
    folder = EXAMPLES.parent / ".cache/models" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: make demo-train writes it")
    text = EXAMPLES.parent / "docs/design.md"
    given = ["--block_tokens", "32", "--max_steps", "20", "--learning_rate", "2e-5"]
    with pytest.MonkeyPatch.context() as patched:
        plain = [*arguments(folder, text, tmp_path / "plain"), *given, "--per_device_train_batch_size", "2"]
        patched.setattr("sys.argv", ["x", *plain])
        finetune.main()
        forget_earlier_trainers()
    zero3 = [*arguments(folder, text, tmp_path / "zero3"), *given, "--per_device_train_batch_size", str(2 // ranks)]
    config = EXAMPLES / "ds_config_train_zero3.json"
    trained = launch(ranks, *zero3, "--deepspeed", config, example="finetune_trainer.py", limit_s=3600)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["x", *(str(tmp_path / run / "losses.json") for run in ("plain", "zero3"))])
        assert compare_losses.main() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--text", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["--block_tokens", "1"], "--block_tokens: expected at least 2, got 1"),
        (["--eval_share", "1"], "--eval_share: expected a number between 0 and 1, got 1.0"),
        (["--block_tokens", "1000"], "expected at least 2 blocks of 1000 tokens, got 0"),
        (["--max_steps", "many"], "argument --max_steps"),
    ],
)
def test_a_wrong_argument_is_one_line_before_a_model_is_loaded(
    finetune: ModuleType,
    model: Path,
    text: Path,
    tmp_path: Path,
    change: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sys.argv", ["examples/finetune_trainer.py", *arguments(model, text, tmp_path), *change])
    with pytest.raises(SystemExit, match="2"):
        finetune.main()
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("finetune_trainer.py: error: ")
    forget_earlier_trainers()


def test_examples_are_cut_from_all_files_and_the_last_ones_are_held_back(
    finetune: ModuleType, model: Path, text: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("sea deep")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    blocks = finetune.read_blocks([short, text], tokenizer, BLOCK)
    assert blocks.shape == (40, BLOCK)
    assert blocks[0, :3].tolist() == [WORDS.index("sea"), WORDS.index("deep"), WORDS.index("<eos>")]
    train, held_back = finetune.split(blocks, 0.1)
    assert (len(train), len(held_back)) == (36, 4)
    assert torch.equal(held_back[3]["labels"], blocks[39])


@pytest.mark.parametrize(
    ("other", "status", "line"),
    [
        ({"1": 2.0, "2": 1.0005}, 0, "EQUAL: all 3 losses"),
        ({"1": 2.0, "2": 1.1}, 1, "training, step 2: 1.0 and 1.1"),
        ({"1": 2.0, "2": float("nan")}, 1, "training, step 2: 1.0 and nan"),
        ({"1": 2.0}, 1, "training, step 2: 1.0 and nan"),
        ({"1": 2.0, "2": 1.0, "3": 1.0}, 1, "DIFFERENT: 1 of 4 losses"),
    ],
)
def test_every_loss_that_differs_is_shown(
    compare_losses: ModuleType,
    other: dict[str, float],
    status: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [tmp_path / "one.json", tmp_path / "other.json"]
    for file, losses in zip(files, ({"1": 2.0, "2": 1.0}, other), strict=True):
        file.write_text(json.dumps({"losses": losses, "eval_losses": {"2": 3.0}}))
    monkeypatch.setattr("sys.argv", ["compare_losses.py", *map(str, files)])
    assert compare_losses.main() == status
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{", "[]", '{"losses": {}}'])
def test_losses_of_no_run_are_an_error(
    compare_losses: ModuleType,
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "losses.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr("sys.argv", ["compare_losses.py", str(file), str(file)])
    with pytest.raises(SystemExit, match="2"):
        compare_losses.main()
    assert f"{file}: expected a losses.json of finetune_trainer.py" in capsys.readouterr().err
