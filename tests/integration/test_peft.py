"""PEFT over an engine: adapters are trained, saved, loaded, merged and switched as PEFT does it to the plain model.

Models come from ``from_pretrained`` while an `HfDeepSpeedConfig` lives, as those of users do: they are partitioned when
PEFT puts its adapters on. Each rank draws other random values for those, and rank 0's count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.comparisons import PlainTrainer, Tolerance
from tests.harness import distributed
from tests.models import build, token_ids, zero3_config

LR = 1e-2
TIMEOUT_S = 120.0
CLOSE = Tolerance(rtol=1e-4, atol=1e-5)
WEIGHTS = Tolerance(rtol=1e-4, atol=LR / 100)
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**options: Any) -> LoraConfig:
    """Adapters that do something from the first step on: by default PEFT's begin as zero."""
    options = {"target_modules": ATTENTION, "init_lora_weights": False, **options}
    return LoraConfig(r=4, lora_alpha=8, task_type=TaskType.CAUSAL_LM, **options)


ADAPTERS: dict[str, tuple[str, Callable[[], PeftConfig]]] = {
    "lora": ("llama", lora),
    "dora": ("llama", lambda: lora(use_dora=True)),
    "modules to save": ("llama", lambda: lora(modules_to_save=["lm_head"])),
    "prompt": ("llama", lambda: PromptTuningConfig(num_virtual_tokens=3, task_type=TaskType.CAUSAL_LM)),
    "lora on a MoE": ("mixtral", lora),
    "lora on experts": ("mixtral", lambda: lora(target_parameters=EXPERTS)),
}
"""The name of the model, and what is put on it."""
DEFAULT_KINDS = ("lora", "prompt", "lora on experts")
KINDS = pytest.mark.parametrize(
    "kind", [kind if kind in DEFAULT_KINDS else pytest.param(kind, marks=pytest.mark.slow) for kind in ADAPTERS]
)
GATHERS = pytest.mark.parametrize("gather", ["auto", pytest.param("collective", marks=pytest.mark.slow)])


class Pair:
    """An engine around a model with adapters, and the same without DeepSpeed."""

    def __init__(self, kind: str, folder: Path, gather: str = "collective") -> None:
        name, make_config = ADAPTERS[kind]
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.base = build(name)
        if self.rank == 0:
            self.base.save_pretrained(folder / "base")
        torch.distributed.barrier()
        torch.manual_seed(0)
        self.plain = get_peft_model(copy.deepcopy(self.base), make_config())
        self.config = zero3_config(gather=gather, lr=LR)
        # transformers and PEFT ask for it as long as it lives.
        self.hf_config = HfDeepSpeedConfig(copy.deepcopy(self.config))
        self.model = get_peft_model(self.load_base(folder / "base"), self._config_of_this_rank(make_config))
        self.engine, *_ = deepspeed.initialize(model=self.model, config=self.config)
        self.plain.eval()
        self.engine.eval()
        self.trainer = PlainTrainer(self.plain, lr=LR)
        self.steps = 0

    def load_base(self, folder: Path) -> PreTrainedModel:
        """Partitioned."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
        return model

    def _config_of_this_rank(self, make_config: Callable[[], PeftConfig]) -> PeftConfig:
        torch.manual_seed(self.rank)
        return make_config()

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.steps += 1
            batches = [token_ids(seed=100 * self.steps + rank) for rank in range(self.world_size)]
            ids = batches[self.rank]
            loss = self.engine(input_ids=ids, labels=ids).loss
            self.engine.backward(loss)
            self.engine.step()
            expected = self.trainer.step(batches)
            CLOSE.check(loss.detach(), expected[self.rank], f"the loss of step {self.steps}")

    def compare_logits(self, model: Any, plain: Any, what: str) -> None:
        ids = token_ids(seed=7 + self.rank)
        with torch.no_grad():
            CLOSE.check(model(input_ids=ids).logits, plain(input_ids=ids).logits, what)

    def save_adapters(self, folder: Path) -> Path:
        """As a training loop of one's own does: whole while they are saved, and saved by one rank."""
        # Without grad: PEFT computes the embeddings of a prompt to save them.
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())), torch.no_grad():
            if self.rank == 0:
                self.model.save_pretrained(folder / "adapters")
        torch.distributed.barrier()
        return folder / "adapters"


def plain_with_adapters(base: PreTrainedModel, folder: Path) -> Any:
    """As a process without DeepSpeed loads them."""
    unset_hf_deepspeed_config()
    return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@KINDS
def test_adapters_are_trained_saved_and_loaded(kind: str, shared_dir: Path) -> None:
    pair = Pair(kind, shared_dir)
    pair.train()
    with deepspeed.zero.GatheredParameters(list(pair.model.parameters())):
        expected = dict(pair.plain.named_parameters())
        for name, parameter in pair.model.named_parameters():
            WEIGHTS.check(parameter.data, expected[name].data, name)
    saved = pair.save_adapters(shared_dir)
    loaded = plain_with_adapters(pair.base, saved)
    for name, parameter in loaded.named_parameters():
        WEIGHTS.check(parameter.data, expected[name].data, f"{name}, saved and loaded")
    # And into a partitioned model.
    pair.engine.destroy()
    pair.hf_config = HfDeepSpeedConfig(zero3_config())
    again = PeftModel.from_pretrained(pair.load_base(shared_dir / "base"), saved)
    engine, *_ = deepspeed.initialize(model=again, config=zero3_config())
    engine.eval()
    pair.compare_logits(engine, loaded, "logits of adapters that were loaded into a partitioned model")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@KINDS
@GATHERS
def test_adapters_are_merged(kind: str, gather: str, rank: int, shared_dir: Path) -> None:
    if kind == "prompt":
        pytest.skip("there is nothing to merge it with")
    pair = Pair(kind, shared_dir, gather)
    pair.train()
    with deepspeed.zero.GatheredParameters(list(pair.model.parameters()), modifier_rank=0):
        merged = pair.model.merge_and_unload()
        if rank == 0:
            merged.save_pretrained(shared_dir / "merged")
    plain = pair.plain.merge_and_unload()
    pair.compare_logits(merged, plain, "logits of the merged model")
    torch.distributed.barrier()
    unset_hf_deepspeed_config()
    loaded = AutoModelForCausalLM.from_pretrained(shared_dir / "merged").eval()
    pair.compare_logits(loaded, plain, "logits of the merged model, saved and loaded")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@GATHERS
def test_adapters_are_switched_between_steps(gather: str, shared_dir: Path) -> None:
    """The model without its adapters is the reference of the one with them: trl's way to have one model less."""
    pair = Pair("lora", shared_dir, gather)
    for _ in range(2):
        pair.train(steps=1)
        with pair.model.disable_adapter():
            pair.compare_logits(pair.engine, pair.base, "logits without adapters")
        pair.compare_logits(pair.engine, pair.plain, "logits with adapters")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_two_adapters(shared_dir: Path) -> None:
    """A second, frozen adapter that begins as a copy of the first: trl's reference for a model that has adapters."""
    pair = Pair("lora", shared_dir)
    pair.engine.destroy()
    for model in (pair.model, pair.plain):
        model.add_adapter("ref", model.peft_config["default"])
        with deepspeed.zero.GatheredParameters(
            list(model.parameters()) if model is pair.model else [], modifier_rank=0
        ):
            for name, parameter in model.named_parameters():
                if ".default." in name:
                    model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
    pair.engine, *_ = deepspeed.initialize(model=pair.model, config=pair.config)
    pair.engine.eval()
    before = copy.deepcopy(pair.plain)
    pair.train()
    for adapter, expected in (("ref", before), ("default", pair.plain)):
        pair.model.set_adapter(adapter)
        pair.compare_logits(pair.engine, expected, f"logits with {adapter}")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.slow), "lora on experts"])
def test_gradient_checkpointing_over_frozen_weights(kind: str, reentrant: bool, shared_dir: Path) -> None:
    pair = Pair(kind, shared_dir)
    pair.engine.train()
    for model in (pair.model, pair.plain):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    pair.train(steps=3)
    pair.engine.eval()
    pair.compare_logits(pair.engine, pair.plain, "logits after training with recomputation")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_adapters_added_after_initialize(shared_dir: Path) -> None:
    """They work in a forward; a step, which would leave them as they are, says what to do."""
    pair = Pair("lora", shared_dir)
    for model in (pair.model, pair.plain):
        torch.manual_seed(1)
        model.add_adapter("late", lora())
        model.set_adapter("late")
    pair.compare_logits(pair.engine, pair.plain, "logits with the late adapter")
    ids = token_ids(seed=pair.rank)
    loss = pair.engine(input_ids=ids, labels=ids).loss
    pair.engine.backward(loss)
    with pytest.raises(RuntimeError, match=r"parameter \S*lora_A\.late\.weight was added .*deepspeed\.initialize"):
        pair.engine.step()
