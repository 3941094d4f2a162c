"""Multilayer perceptrons that can load Gymformer's checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Perceptron(nn.Module):
    """A network with two hidden layers."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        # Sizes from Gymnasium's spaces may be NumPy integers, which nn.Linear does not accept.
        self.fc1 = nn.Linear(int(input_dim), hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, int(output_dim))

    def forward(self, state: Tensor) -> Tensor:
        """Return outputs [..., output_dim] of `state` [..., input_dim]."""
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(state))))
        output: Tensor = self.fc3(hidden)
        return output


class MLPActorNetwork(_Perceptron):
    """An actor, which returns logits of discrete actions or means of continuous actions."""


class MLPCriticNetwork(_Perceptron):
    """A critic, which returns the value of a state."""

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__(input_dim, hidden_dim, 1)
