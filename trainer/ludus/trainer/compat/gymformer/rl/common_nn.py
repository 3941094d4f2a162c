"""Perceptrons under Gymformer's names; checkpoints of theirs can be loaded into them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MLPActorNetwork(nn.Module):
    """Logits of discrete actions, or means of continuous ones, from two hidden layers."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        # Numbers from Gymnasium's spaces may be numpy's, which linear layers do not take.
        self.fc1 = nn.Linear(int(input_dim), hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, int(output_dim))

    def forward(self, state: Tensor) -> Tensor:
        """Logits or means [..., output_dim] of `state` [..., input_dim]."""
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(state))))
        output: Tensor = self.fc3(hidden)
        return output


class MLPCriticNetwork(nn.Module):
    """The value of a state, from two hidden layers."""

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(int(input_dim), hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, 1)

    def forward(self, state: Tensor) -> Tensor:
        """Values [..., 1] of `state` [..., input_dim]."""
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(state))))
        value: Tensor = self.fc3(hidden)
        return value
