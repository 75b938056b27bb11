"""Comparing an engine with the same model without DeepSpeed, and looking at what it left in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from tests.models import ADAM_EPS, WEIGHT_DECAY


@dataclass(frozen=True)
class Tolerance:
    """Largest difference that the order of additions explains; zero means bitwise equal."""

    rtol: float = 0.0
    atol: float = 0.0

    def check(self, actual: torch.Tensor, expected: torch.Tensor | float, what: str) -> None:
        torch.testing.assert_close(
            actual,
            torch.as_tensor(expected),
            rtol=self.rtol,
            atol=self.atol,
            msg=lambda text: f"{what} differs from plain torch: {text}",
        )


EXACT = Tolerance()


def assert_same_weights(engine_module: nn.Module, plain: nn.Module, tolerance: Tolerance = EXACT) -> None:
    """Gather every parameter and compare it on this rank. A collective: call it on all ranks."""
    expected = dict(plain.named_parameters())
    parameters = dict(engine_module.named_parameters())
    assert parameters.keys() == expected.keys()
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        for name, parameter in parameters.items():
            tolerance.check(parameter.data, expected[name].data, name)


def assert_released(module: nn.Module) -> None:
    """No parameter is in flight, and only persistent ones are whole."""
    wrong = [
        f"{name}: {parameter.ds_status.name}"
        for name, parameter in module.named_parameters()
        if parameter.ds_status is ZeroParamStatus.INFLIGHT
        or (parameter.ds_status is not ZeroParamStatus.NOT_AVAILABLE and not parameter.ds_persist)
    ]
    assert not wrong, f"expected every parameter that is not persistent to be released, got {wrong}"


class PlainTrainer:
    """Data-parallel training as plain torch would do it in one process: one backward per rank, gradients averaged.

    With ``master_weights`` the model's low-precision weights are copies of fp32 ones that the optimizer updates.
    """

    def __init__(self, model: nn.Module, *, lr: float, master_weights: bool = False) -> None:
        self.model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [p.detach().float().clone() for p in self._parameters] if master_weights else None
        updated: Sequence[torch.Tensor] = self._parameters if self._masters is None else self._masters
        self._optimizer = torch.optim.AdamW(updated, lr=lr, weight_decay=WEIGHT_DECAY, eps=ADAM_EPS)

    def step(self, batches: Sequence[torch.Tensor]) -> list[float]:
        """One update with one batch of token ids for each rank; the loss of each."""
        return self.step_on([partial(self._token_loss, ids) for ids in batches])

    def step_on(self, losses: Sequence[Callable[[], torch.Tensor]]) -> list[float]:
        """One update with one loss for each rank, computed when it is its turn; the values."""
        values = []
        for compute in losses:
            loss = compute()
            (loss / len(losses)).backward()
            values.append(loss.item())
        self.update()
        return values

    def _token_loss(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def update(self) -> None:
        """Apply and clear the gradients.

        A parameter without one counts as having gradient zero, as it does for ZeRO: its momentum and decay still move
        it.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._masters is not None:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._masters is not None:
            with torch.no_grad():
                for master, parameter in zip(self._masters, self._parameters, strict=True):
                    parameter.copy_(master)
                    parameter.grad = None
