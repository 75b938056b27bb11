"""accelerate over an engine: the loop of its documentation, with what people put into it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.comparisons import EXACT, Tolerance, assert_same_weights
from tests.harness import distributed
from tests.models import ADAM_EPS, build, zero3_config
from tests.trainer_runs import Texts, forget_earlier_trainers

TIMEOUT_S = 120.0
LR = 1e-2
EXAMPLES = 16
CLIPPING = 0.2
CLOSE = Tolerance(rtol=1e-4, atol=1e-4)

Batch = dict[str, torch.Tensor]


def plugin(offload: str = "none", **options: Any) -> DeepSpeedPlugin:
    """With a ds_config whose batch sizes accelerate fills in. Ranks gather as they do by default."""
    config = zero3_config(offload=offload, stage3_gather_16bit_weights_on_model_save=True)
    del config["zero_optimization"]["stage3_gather"]
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    return DeepSpeedPlugin(hf_ds_config={**config, **options})


def accelerator_with(plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin], **options: Any) -> Accelerator:
    forget_earlier_trainers()
    PartialState(cpu=True)  # before the Accelerator, which knows DeepSpeed on other devices only
    return Accelerator(deepspeed_plugins=plugins, **options)


def adamw(model: torch.nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=LR, eps=ADAM_EPS)


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def texts(count: int = EXAMPLES) -> DataLoader[Batch]:
    return DataLoader(Texts(count), batch_size=1)


@dataclass
class Loop:
    """The loop of accelerate's documentation."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    @classmethod
    def prepared(cls, accelerator: Accelerator, model: PreTrainedModel) -> Loop:
        optimizer = adamw(model)
        return cls(accelerator, *accelerator.prepare(model, optimizer, texts(), falling(optimizer)))

    def run(self, batches: Any) -> tuple[list[float], list[float]]:
        """The loss of each of this rank's batches, and the norm of the gradients of each step."""
        losses, norms = [], []
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), CLIPPING)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms


class PlainLoop:
    """The same in one process, with the batches of all ranks. accelerate turns the scheduler once for each rank."""

    def __init__(self, model: PreTrainedModel, world_size: int, accumulation: int) -> None:
        self.model = model
        self._world_size = world_size
        self._accumulation = accumulation
        self._optimizer = adamw(model)
        self._scheduler = falling(self._optimizer)

    def run(self, examples: Sequence[Batch]) -> tuple[list[list[float]], list[float]]:
        """The losses of each rank, and the norms."""
        losses: list[list[float]] = [[] for _ in range(self._world_size)]
        norms = []
        count = self._world_size * self._accumulation
        for start in range(0, len(examples), count):
            for index, batch in enumerate(examples[start : start + count]):
                loss = self.model(**batch).loss
                (loss / count).backward()
                losses[index % self._world_size].append(loss.item())
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPING)))
            self._optimizer.step()
            self._optimizer.zero_grad()
            for _ in range(self._world_size):
                self._scheduler.step()
        return losses, norms


def check(values: list[float], expected: list[float], what: str) -> None:
    CLOSE.check(torch.tensor(values), torch.tensor(expected), what)


@distributed(world_size=(1, 2), timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(("name", "offload"), [("llama", "none"), ("mixtral", "cpu")])
def test_the_documented_loop_equals_plain_torch(name: str, offload: str, rank: int, world_size: int) -> None:
    accelerator = accelerator_with(
        plugin(offload, gradient_clipping=CLIPPING, zero_force_ds_cpu_optimizer=False), gradient_accumulation_steps=2
    )
    loop = Loop.prepared(accelerator, build(name).train())
    plain = PlainLoop(build(name).train(), world_size, accumulation=2)
    losses, norms = loop.run(loop.loader)
    expected_losses, expected_norms = plain.run(list(texts()))
    check(losses, expected_losses[rank], "loss")
    check(norms, expected_norms, "norm")
    assert_same_weights(loop.model.module, plain.model, CLOSE)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_a_state_that_was_saved_goes_on_as_if_nothing_had_happened(shared_dir: Path) -> None:
    accelerator = accelerator_with(plugin(gradient_clipping=CLIPPING))
    whole = Loop.prepared(accelerator, build("llama").train())
    whole.run(itertools.islice(whole.loader, 3))
    accelerator.save_state(str(shared_dir / "state"))
    expected = whole.run(accelerator.skip_first_batches(whole.loader, 3))

    resumed_accelerator = accelerator_with(plugin(gradient_clipping=CLIPPING))
    resumed = Loop.prepared(resumed_accelerator, build("llama", seed=1).train())
    resumed_accelerator.load_state(str(shared_dir / "state"))
    assert resumed.run(resumed_accelerator.skip_first_batches(resumed.loader, 3)) == expected
    with deepspeed.zero.GatheredParameters(list(whole.model.parameters())):
        weights = copy.deepcopy({name: value.data for name, value in whole.model.module.named_parameters()})
    model = build("llama")
    model.load_state_dict(weights)
    assert_same_weights(resumed.model.module, model, EXACT)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_what_is_saved_is_what_transformers_reads(shared_dir: Path) -> None:
    accelerator = accelerator_with(plugin())
    loop = Loop.prepared(accelerator, build("gpt2").train())
    loop.run(itertools.islice(loop.loader, 2))
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(loop.model)
    accelerator.unwrap_model(loop.model).save_pretrained(
        shared_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    accelerator.wait_for_everyone()
    accelerator.save_model(loop.model, str(shared_dir / "by accelerate"))
    accelerator.wait_for_everyone()
    forget_earlier_trainers()
    assert_same_weights(loop.model.module, AutoModelForCausalLM.from_pretrained(shared_dir))


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_metrics_of_a_last_batch_that_one_rank_lacks() -> None:
    accelerator = accelerator_with(plugin())
    plain, model = build("llama"), build("llama")
    model, _, loader = accelerator.prepare(model, adamw(model), texts(5))
    model.eval()
    gathered = []
    for batch in loader:
        with torch.no_grad():
            gathered.append(accelerator.gather_for_metrics(model(**batch).logits))
    with torch.no_grad():
        expected = torch.cat([plain(**batch).logits for batch in texts(5)])
    CLOSE.check(torch.cat(gathered), expected, "logits")


@distributed(world_size=2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_student_learns_from_a_teacher_with_a_plugin_of_its_own(stage: int, rank: int, world_size: int) -> None:
    plugins = {
        "student": plugin(zero_optimization={"stage": stage}),
        "teacher": plugin(train_micro_batch_size_per_gpu=1),
    }
    accelerator = accelerator_with(plugins)
    student = build("llama").train()
    student, optimizer, loader = accelerator.prepare(student, adamw(student), texts())
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(build("mixtral", seed=1))
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")

    plain, plain_teacher = build("llama").train(), build("mixtral", seed=1)
    plain_optimizer = adamw(plain)

    def distance(one: Any, other: Any, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            wanted = other(**batch).logits.log_softmax(-1)
        given = one(**batch).logits.log_softmax(-1)
        return torch.nn.functional.kl_div(given, wanted, log_target=True, reduction="batchmean")

    everything = list(texts())
    for step, batch in enumerate(loader):
        loss = distance(student, teacher, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for number in range(world_size):
            plain_loss = distance(plain, plain_teacher, everything[step * world_size + number])
            (plain_loss / world_size).backward()
            if number == rank:
                check([loss.item()], [plain_loss.item()], f"loss of step {step}")
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert_same_weights(student.module, plain, CLOSE)
    assert_same_weights(teacher.module, plain_teacher)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_two_models_are_trained_in_turn(rank: int, world_size: int) -> None:
    plugins = {
        "one": plugin(),
        "other": plugin("cpu", train_micro_batch_size_per_gpu=1, zero_force_ds_cpu_optimizer=False),
    }
    one_accelerator = accelerator_with(plugins)
    other_accelerator = Accelerator()
    one, other = build("llama").train(), build("mixtral", seed=1).train()
    one, one_optimizer, loader = one_accelerator.prepare(one, adamw(one), texts())
    other_accelerator.state.select_deepspeed_plugin("other")
    other, other_optimizer = other_accelerator.prepare(other, adamw(other))
    trained = [(one_accelerator, one, one_optimizer), (other_accelerator, other, other_optimizer)]

    plain = [build("llama").train(), build("mixtral", seed=1).train()]
    plain_optimizers = [adamw(model) for model in plain]
    everything = list(texts())
    for step, batch in enumerate(loader):
        for accelerator, model, optimizer in trained:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        for model, optimizer in zip(plain, plain_optimizers, strict=True):
            for number in range(world_size):
                (model(**everything[step * world_size + number]).loss / world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (_, model, _), expected in zip(trained, plain, strict=True):
        assert_same_weights(model.module, expected, CLOSE)


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_after_free_memory_another_model_can_be_prepared(rank: int, world_size: int) -> None:
    accelerator = accelerator_with(plugin(gradient_clipping=CLIPPING))
    for name in ("llama", "gpt2"):
        loop = Loop.prepared(accelerator, build(name).train())
        plain = PlainLoop(build(name).train(), world_size, accumulation=1)
        losses, _ = loop.run(loop.loader)
        check(losses, plain.run(list(texts()))[0][rank], "loss")
        loop.model, loop.optimizer, loop.loader, loop.scheduler = accelerator.free_memory(
            loop.model, loop.optimizer, loop.loader, loop.scheduler
        )
