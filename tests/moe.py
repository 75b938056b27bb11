"""Hand-written models whose control flow depends on the data: experts in an ``nn.ModuleList``, and branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

HIDDEN = 16
EXPERT_WIDTH = 32


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, EXPERT_WIDTH)
        self.down = nn.Linear(EXPERT_WIDTH, HIDDEN)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x_TD)))


class RoutedBlock(nn.Module):
    """Top-k routing by the data. T tokens, D hidden, E experts, K experts per token.

    ``chosen`` overrides the router: every token goes to exactly those experts, with the router's weights.
    """

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.top_k = top_k
        self.chosen: Sequence[int] | None = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TE = torch.softmax(self.router(x_TD), dim=-1)
        if self.chosen is None:
            index_TK = weights_TE.topk(self.top_k, dim=-1).indices
        else:
            index_TK = torch.tensor(self.chosen).expand(x_TD.shape[0], -1)
        out_TD = torch.zeros_like(x_TD)
        for number in index_TK.unique().tolist():
            routed_T = (index_TK == number).any(dim=-1)
            update_RD = weights_TE[routed_T, number, None] * self.experts[number](x_TD[routed_T])
            out_TD = out_TD.index_add(0, routed_T.nonzero().squeeze(-1), update_RD)
        return x_TD + out_TD


class RoutedModel(nn.Module):
    def __init__(self, layers: int = 3, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(RoutedBlock(experts, top_k) for _ in range(layers))
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = self.first(x_TD)
        for block in self.blocks:
            x_TD = block(x_TD)
        return self.last(x_TD)

    def route_to(self, chosen: Sequence[int] | None) -> None:
        for block in self.blocks:
            assert isinstance(block, RoutedBlock)
            block.chosen = chosen


class BranchModel(nn.Module):
    """A linear layer (say, an image tower) runs only for inputs that ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.branch = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_TD: torch.Tensor, with_branch: bool) -> torch.Tensor:
        x_TD = torch.relu(self.first(x_TD))
        if with_branch:
            x_TD = x_TD + self.branch(x_TD)
        return self.last(x_TD)


def seeded(model_class: type[nn.Module], seed: int = 0) -> nn.Module:
    """A new model with weights that depend on ``seed`` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class()


def hidden_states(seed: int, tokens: int = 6) -> torch.Tensor:
    """Random input, ``(tokens, HIDDEN)``."""
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
