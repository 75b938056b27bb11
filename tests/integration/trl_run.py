"""trl's own scripts, unchanged and offline, each with ZeRO-3 on some ranks and without DeepSpeed on as many.

As a program (``python -m tests.integration.trl_run FOLDER``) it runs the cases that `run_cases` has written to FOLDER.
It imports trl, which takes seconds, and then forks the ranks of one run after the other.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import shared_segments
from tests.integration.started_ranks import environment, free_port
from tests.models import build, zero3_config

SECONDS_A_RUN = 120.0
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
SENTENCES = [
    f"the {colour} {animal} {does} the {place}"
    for colour in ("red", "blue", "old", "new")
    for animal in ("cat", "dog", "car")
    for does in ("sees", "likes")
    for place in ("house", "tree", "road")
]
REWARD = '''def length(completions, **kwargs):
    """Longer is better, up to 8 words."""
    return [min(8, len(completion[0]["content"].split())) / 8 for completion in completions]
'''
SETTINGS = [
    *("--use_cpu", "--bf16", "False", "--dtype", "float32"),
    *("--max_steps", "3", "--per_device_train_batch_size", "2", "--seed", "3"),
    *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--adam_epsilon", "1e-3", "--max_grad_norm", "0"),
    *("--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "True", "--save_strategy", "no"),
]
"""fp32, so that numbers can be compared. Adam's epsilon is far above rounding."""


@dataclass(frozen=True)
class Case:
    """One of trl's scripts, with arguments. ``data`` and ``model`` are names of folders that `write_folders` makes."""

    name: str
    script: str
    data: str
    arguments: str = ""
    model: str = "llama"
    gather: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """What a run has logged in each step, and the weights that it has saved."""

    logs: list[dict[str, str]]
    weights: dict[str, torch.Tensor]


def run_cases(folder: Path, cases: list[Case]) -> dict[str, tuple[Outcome, Outcome]]:
    """The outcome with ZeRO-3 and without, by the cases' names. Raises a RuntimeError with the log of what failed."""
    write_folders(folder, {case.model for case in cases})
    (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    program = [sys.executable, "-m", "tests.integration.trl_run", str(folder)]
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        program, cwd=repository, env=environment(free_port()), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}")
    return {case.name: (outcome_of(folder, f"{case.name}.zero3"), outcome_of(folder, case.name)) for case in cases}


def outcome_of(folder: Path, run: str) -> Outcome:
    text = log_of(folder, run, rank=0).read_text()
    logs = [ast.literal_eval(found) for found in re.findall(r"\{'loss'.*?\}", text)]
    (saved,) = (folder / run).glob("*model.safetensors")
    return Outcome(logs, load_file(saved))


def log_of(folder: Path, run: str, rank: int) -> Path:
    return folder / f"{run}.{rank}.log"


def write_folders(folder: Path, names: set[str]) -> None:
    """Models with a tokenizer of words, and a data set of each kind."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()} | {"user", "assistant"})
    vocabulary = {token: number for number, token in enumerate([PAD, START, END, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=PAD, eos_token=END, unk_token=UNKNOWN
    )
    fast.add_special_tokens({"additional_special_tokens": [START]})
    fast.chat_template = CHAT_TEMPLATE
    for name in names:
        model = build(name)
        model.generation_config.eos_token_id = vocabulary[END]
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    prompts = [_said("user", " ".join(sentence.split()[:3])) for sentence in SENTENCES]
    # Of different lengths, so that ranks have different work.
    answers = [_said("assistant", " ".join(sentence.split()[3:] * (1 + n % 3))) for n, sentence in enumerate(SENTENCES)]
    others = answers[5:] + answers[:5]
    rows: dict[str, list[dict[str, Any]]] = {
        "conversations": [{"messages": [p, a]} for p, a in zip(prompts, answers, strict=True)],
        "preferences": [
            {"prompt": [p], "chosen": [a], "rejected": [o]} for p, a, o in zip(prompts, answers, others, strict=True)
        ],
        "prompts": [{"prompt": [p]} for p in prompts],
    }
    for kind, lines in rows.items():
        (folder / kind).mkdir()
        (folder / kind / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "toy_rewards.py").write_text(REWARD)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# -- the program --


def main(folder: Path, ranks: int = 2) -> int:
    import trl
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer  # noqa: F401  before ranks fork

    scripts = Path(trl.__file__).parent / "scripts"
    os.chdir(folder)
    for case in (Case(**fields) for fields in json.loads(Path("cases.json").read_text())):
        for run, zero3 in ((case.name, False), (f"{case.name}.zero3", True)):
            port = free_port()
            launched = _zero3_environment(folder, case) if zero3 else {"ACCELERATE_USE_CPU": "true"}
            arguments = [
                *SETTINGS,
                "--model_name_or_path",
                case.model,
                "--dataset_name",
                case.data,
                "--output_dir",
                run,
            ]
            processes = {
                rank: _fork_rank(
                    {**launched, **_rank_environment(rank, ranks, port)},
                    scripts / f"{case.script}.py",
                    [*arguments, *case.arguments.split()],
                    log_of(folder, run, rank),
                )
                for rank in range(ranks)
            }
            failed = _wait(processes)
            shared_segments.remove(shared_segments.named_after([port]))  # DeepSpeed leaves them behind
            if failed:
                logs = "\n".join(f"rank {r}:\n{log_of(folder, run, r).read_text()[-2500:]}" for r in range(ranks))
                print(f"{run}: {failed}\n{logs}")
                return 1
    return 0


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    return {**{name: str(n) for name, n in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _zero3_environment(folder: Path, case: Case) -> dict[str, str]:
    """What `accelerate launch` tells a rank with a ds_config; nothing is persistent in a model that small."""
    config = zero3_config(gather=case.gather, stage3_gather_16bit_weights_on_model_save=True)
    if case.gather == "auto":
        del config["zero_optimization"]["stage3_gather"]
    config.update(
        train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", zero_allow_untested_optimizer=True
    )
    path = folder / f"{case.name}.json"
    path.write_text(json.dumps(config))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
    }


def _fork_rank(own: dict[str, str], script: Path, arguments: list[str], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(own)
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(processes: dict[int, int]) -> dict[int, int]:
    """Exit codes that are not zero, by rank. Ranks that are not through in time are killed."""
    deadline_s = time.monotonic() + SECONDS_A_RUN
    handles = {rank: os.pidfd_open(pid) for rank, pid in processes.items()}
    failed = {}
    for rank, pid in processes.items():
        ready, *_ = select.select([handles[rank]], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(handles[rank])
        if code:
            failed[rank] = code
    return failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1])))
