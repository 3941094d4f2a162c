"""Multilayer perceptrons that can load Gymformer's checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MLPActorNetwork(nn.Module):
    """An actor with two hidden layers: logits of discrete actions or means of continuous ones."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        # Sizes from Gymnasium's spaces may be NumPy integers, which nn.Linear does not accept.
        self.fc1 = nn.Linear(int(input_dim), hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, int(output_dim))

    def forward(self, state: Tensor) -> Tensor:
        """Return logits or means [..., output_dim] of `state` [..., input_dim]."""
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(state))))
        output: Tensor = self.fc3(hidden)
        return output


class MLPCriticNetwork(nn.Module):
    """A critic with two hidden layers: the value of a state."""

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(int(input_dim), hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, 1)

    def forward(self, state: Tensor) -> Tensor:
        """Return values [..., 1] of `state` [..., input_dim]."""
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(state))))
        value: Tensor = self.fc3(hidden)
        return value
