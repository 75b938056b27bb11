"""examples/generate.py and compare_with_plain.py on a small model in a folder: as a user starts them, and in parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from tests.integration.launching import launch
from tests.integration.loading import load_example

WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", "what", "who", "where", "is", "was", "the", "sea", "poem", "write"]
TEMPLATE = (
    "{% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["what is the sea", "who was the", "write the poem"]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_example("generate")


@pytest.fixture(scope="module")
def compare_with_plain() -> ModuleType:
    return load_example("compare_with_plain")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, generate: ModuleType) -> Path:
    """A folder with a Mixtral of random weights, too wide for every parameter to be persistent, and a tokenizer.

    A token that it writes for the first prompt is made an end of sequence, so that this answer ends by itself.
    """
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
    mixtral = MixtralForCausalLM(config).to(torch.bfloat16).eval()
    output = mixtral.generate(**generate.encode(fast, PROMPTS[:1]), max_new_tokens=NEW_TOKENS, do_sample=False)
    mixtral.generation_config.eos_token_id = [1, output[0, 2 - NEW_TOKENS].item()]
    mixtral.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts of unequal length: one rank of two gets two of them."""
    file = tmp_path / "prompts.txt"
    file.write_text("{}\n\n{}\n{}\n".format(*PROMPTS))
    return file


class TestUnderTheLauncher:
    @pytest.mark.parametrize(
        ("ranks", "offload"),
        [(2, "cpu"), *(pytest.param(ranks, "none", marks=pytest.mark.slow) for ranks in (1, 2))],
    )
    def test_the_tokens_equal_plain_transformers(
        self,
        model: Path,
        prompts: Path,
        tmp_path: Path,
        ranks: int,
        offload: str,
        compare_with_plain: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        tokens = tmp_path / "tokens.json"
        files: list[str | Path] = ["--model", model, "--prompts", prompts, "--output", tokens]
        generated = launch(
            ranks, *files, "--max-new-tokens", str(NEW_TOKENS), "--offload", offload, example="generate.py"
        )
        assert generated.returncode == 0, generated.stdout + generated.stderr
        announced = f"generating up to {NEW_TOKENS} tokens for each of 3 prompts on {ranks} ranks ..."
        assert generated.stdout.count(announced) == 1
        for rank in range(ranks):
            assert f"rank {rank}: " in generated.stdout
        assert "tokens/s, peak" in generated.stdout

        recorded = json.loads(tokens.read_text())
        given = [prompt for rank in recorded["ranks"] for prompt in rank["prompts"]]
        assert sorted(given) == PROMPTS
        ends = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
        for rank in recorded["ranks"]:
            assert rank["cut"] == [not set(ends) & set(row) for row in rank["tokens"]]
        assert recorded["ranks"][0]["cut"][0] is False

        assert compare(compare_with_plain, monkeypatch, model, tokens) == 0
        count = sum(len(row) for rank in recorded["ranks"] for row in rank["tokens"])
        assert f"EQUAL: all {count} tokens equal plain transformers" in capsys.readouterr().out

    def test_a_divided_model_writes_the_same(
        self,
        model: Path,
        prompts: Path,
        tmp_path: Path,
        compare_with_plain: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """examples/generate_tensor_parallel.py: all ranks work on all prompts."""
        tokens = tmp_path / "tokens.json"
        files: list[str | Path] = ["--model", model, "--prompts", prompts, "--output", tokens]
        generated = launch(2, *files, "--max-new-tokens", str(NEW_TOKENS), example="generate_tensor_parallel.py")
        assert generated.returncode == 0, generated.stdout + generated.stderr
        (recorded,) = json.loads(tokens.read_text())["ranks"]
        assert recorded["prompts"] == PROMPTS
        assert compare(compare_with_plain, monkeypatch, model, tokens) == 0
        assert f"EQUAL: all {3 * NEW_TOKENS} tokens" in capsys.readouterr().out

    def test_an_error_of_the_user_is_one_line_and_the_exit_status(self, model: Path, tmp_path: Path) -> None:
        prompts = tmp_path / "one.txt"
        prompts.write_text("what is the sea\n")
        result = launch(2, "--model", model, "--prompts", prompts, example="generate.py")
        assert result.returncode == 2
        assert result.stderr.count("one.txt: expected a prompt for each of 2 ranks, got 1") == 1
        assert "Traceback" not in result.stderr


class TestArguments:
    @pytest.fixture(autouse=True)
    def in_a_rank(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The environment of a rank alone, a working folder with files that are wrong, and no hub."""
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.chdir(tmp_path)
        Path("broken.json").write_text('{"zero_optimization": ')
        Path("list.json").write_text("[]")
        Path("stage2.json").write_text('{"zero_optimization": {"stage": 2}}')
        Path("odd.json").write_text('{"zero_optimization": 3}')
        Path("blank.txt").write_text("\n \n")
        Path("empty").mkdir()
        Path("untyped").mkdir()
        Path("untyped/config.json").write_text("{}")

    @staticmethod
    def parse(
        generate: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int
    ) -> pytest.ExceptionInfo[SystemExit]:
        monkeypatch.setattr("sys.argv", ["examples/generate.py", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            generate.parse_arguments()
        assert exit_info.value.code == status
        return exit_info

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prompts", "nowhere.txt"], "--prompts: nowhere.txt: No such file"),
            (["--prompts", "empty"], "--prompts: empty: Is a directory"),
            (["--prompts", "blank.txt"], "--prompts: blank.txt: expected a prompt for each of 1 ranks, got 0"),
            (["--ds-config", "nowhere.json"], "--ds-config: nowhere.json: No such file"),
            (["--ds-config", "broken.json"], "--ds-config: broken.json: expected JSON, got: Expecting value: line 1"),
            (["--ds-config", "list.json"], "list.json: expected an object with zero_optimization.stage 3, got None"),
            (["--ds-config", "odd.json"], "odd.json: expected an object with zero_optimization.stage 3, got None"),
            (["--ds-config", "stage2.json"], "stage2.json: expected an object with zero_optimization.stage 3, got 2"),
            (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
            (["--offload", "nvme"], "--offload nvme needs --nvme-path"),
            (["--offload", "tape"], "invalid choice: 'tape'"),
            (["--model", "/no/such/folder"], "--model: /no/such/folder: no such folder"),
            (["--model", "no/model"], "--model: no/model: no such folder, and not readable from the hub: We couldn't"),
            (["--model", "empty"], "--model: empty: cannot read its config.json: "),
            (["--model", "untyped"], "--model: untyped: cannot read its config.json: Unrecognized model"),
        ],
    )
    def test_a_wrong_one_is_one_line_before_anything_is_loaded(
        self,
        generate: ModuleType,
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        self.parse(generate, monkeypatch, ["--model", str(model), *arguments], status=2)
        error = capsys.readouterr().err
        assert error.startswith("generate.py: error: ")
        assert message in error
        assert error.count("\n") == 1

    def test_the_other_ranks_of_a_machine_say_nothing_and_do_not_make_the_launcher_kill_the_one_that_speaks(
        self, generate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        self.parse(generate, monkeypatch, ["--model", "empty"], status=0)
        assert capsys.readouterr().err == ""

    def test_without_the_launcher_the_command_that_starts_it_is_given(
        self, generate: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("RANK")
        self.parse(generate, monkeypatch, ["--model", str(model)], status=2)
        expected = f"run with: deepspeed --num_accelerators N examples/generate.py --model {model}\n"
        assert capsys.readouterr().err.endswith(expected)

    def test_the_help_gives_the_defaults(
        self, generate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.parse(generate, monkeypatch, ["--help"], status=0)
        assert "(default: 32)" in capsys.readouterr().out

    def test_right_ones_come_with_the_files_that_they_name_read(
        self, generate: ModuleType, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setattr("sys.argv", ["generate.py", "--model", str(model), "--prompts", str(prompts)])
        options = generate.parse_arguments()
        assert options.model == str(model)
        assert options.prompts == PROMPTS
        assert options.ds_config["zero_optimization"]["stage"] == 3


def test_where_the_shards_rest_is_entered_in_the_ds_config(generate: ModuleType) -> None:
    config = {"zero_optimization": {"stage": 3}}
    assert generate.with_offload(config, "none", None) == config
    entered = generate.with_offload(config, "nvme", Path("disk"))["zero_optimization"]
    assert entered["stage"] == 3
    assert (entered["offload_param"]["device"], entered["offload_param"]["nvme_path"]) == ("nvme", "disk")
    assert "nvme_path" not in generate.with_offload(config, "cpu", None)["zero_optimization"]["offload_param"]


def test_an_answer_that_was_cut_does_not_look_finished(
    generate: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [[WORDS.index("the"), WORDS.index("sea")], [WORDS.index("poem"), WORDS.index("<eos>")]]
    result = generate.RankResult(0, PROMPTS[:2], {}, tokens, [True, False], "bfloat16", 1.0, 2**30, 0)
    generate.report([result], AutoTokenizer.from_pretrained(model))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "rank 0: 4.0 tokens/s, peak 1.00 GiB of host memory"
    assert lines[2:] == ["  > what is the sea", "    the sea ...", "  > who was the", "    poem"]


def test_an_interrupted_output_leaves_the_old_one(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "new" / "tokens.json"
    generate.write_whole(output, {"ranks": []})
    assert [path.name for path in output.parent.iterdir()] == ["tokens.json"]

    def interrupted(path: Path, text: str, **_: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate.write_whole(output, {"ranks": [1, 2, 3]})
    assert json.loads(output.read_text()) == {"ranks": []}


def compare(module: ModuleType, monkeypatch: pytest.MonkeyPatch, model: Path, tokens: Path) -> int:
    monkeypatch.setattr("sys.argv", ["compare_with_plain.py", "--model", str(model), "--tokens", str(tokens)])
    return module.main()


@pytest.fixture(scope="module")
def recorded(model: Path, generate: ModuleType) -> dict[str, Any]:
    """What one rank would record for the first two prompts."""
    inputs = generate.encode(AutoTokenizer.from_pretrained(model), PROMPTS[:2])
    plain = MixtralForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    output = plain.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    rank = {
        "rank": 0,
        "prompts": PROMPTS[:2],
        "inputs": {name: tensor.tolist() for name, tensor in inputs.items()},
        "tokens": output[:, inputs["input_ids"].shape[1] :].tolist(),
        "dtype": "bfloat16",
    }
    return {"model": str(model), "max_new_tokens": NEW_TOKENS, "ranks": [rank]}


class TestCompare:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("none", "EQUAL: all "),
            ("token", "rank 0, 'who was the': token 1: expected ["),
            ("token left out", f"rank 0, 'who was the': token {NEW_TOKENS - 1}: expected ["),
            ("token too many", f"rank 0, 'who was the': token {NEW_TOKENS}: expected [], got [4]"),
            ("answer left out", "rank 0: expected 2 prompts and answers, got 2 prompts and 1 answers"),
            ("prompt left out", "rank 0: expected 2 prompts and answers, got 1 prompts and 2 answers"),
        ],
    )
    def test_whatever_differs_is_shown_and_is_the_exit_status(
        self,
        recorded: dict[str, Any],
        change: str,
        message: str,
        model: Path,
        tmp_path: Path,
        compare_with_plain: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        changed = json.loads(json.dumps(recorded))
        rank = changed["ranks"][0]
        if change == "token":
            rank["tokens"][1][1] += 1
        elif change == "token left out":
            rank["tokens"][1].pop()
        elif change == "token too many":
            rank["tokens"][1].append(4)
        elif change == "answer left out":
            rank["tokens"].pop()
        elif change == "prompt left out":
            rank["prompts"].pop()
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps(changed))
        assert compare(compare_with_plain, monkeypatch, model, tokens) == (0 if change == "none" else 1)
        output = capsys.readouterr().out
        assert message in output
        assert ("DIFFERENT: " in output) == (change != "none")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "No such file"),
            ("{", "expected a file of generate.py, got: Expecting property name"),
            ("[]", "got those of None"),
            ('{"model": "other", "ranks": []}', "got those of 'other'"),
        ],
    )
    def test_tokens_of_no_run_or_another_model_are_an_error(
        self,
        content: str | None,
        message: str,
        tmp_path: Path,
        compare_with_plain: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        tokens = tmp_path / "tokens.json"
        if content is not None:
            tokens.write_text(content)
        with pytest.raises(SystemExit, match="2"):
            compare(compare_with_plain, monkeypatch, tmp_path / "model", tokens)
        error = capsys.readouterr().err
        assert f"--tokens {tokens}: " in error
        assert message in error
