"""Actor and critic: perceptrons made from the configuration, or the user's modules."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ludus.proto.config import NetworkModel
from ludus.proto.errors import ConfigError
from ludus.trainer.classic.heads import Head, NormalHead, Output, make_head
from ludus.trainer.core.functions import import_object

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_ACTOR_OUTPUT_GAIN = 0.01
"""Gain of the actor's last layer. With a small gain, the initial policy is nearly uniform."""
_MAX_ONE_HOT_WIDTH = 4096


class Features(nn.Module):
    """Observations as rows of floats: numbers are flattened, discrete values become one-hot."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self._sizes: list[int] = []
        match space:
            case spaces.Discrete():
                self._sizes = [int(space.n)]
            case spaces.MultiDiscrete():
                self._sizes = [int(size) for size in np.ravel(space.nvec)]
        self.width = sum(self._sizes) or math.prod(space.shape or ())
        if self.width > _MAX_ONE_HOT_WIDTH and self._sizes:
            raise ConfigError(
                f"a perceptron supports at most {_MAX_ONE_HOT_WIDTH} different observations, got "
                f"{self.width}; set model.make to a function that makes other networks"
            )

    def forward(self, observations: Tensor) -> Tensor:
        """Return rows [N, width]."""
        if not self._sizes:
            return observations.flatten(1).float()
        columns = observations.reshape(len(observations), -1)
        parts = [
            nn.functional.one_hot(columns[:, index], size) for index, size in enumerate(self._sizes)
        ]
        return torch.cat(parts, -1).float()


class GaussianActor(nn.Module):
    """An actor with a trained standard deviation, which is the same in all states.

    The mean of the inner module and the deviation are in units of `scale` around `centre`.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, mean: nn.Module, centre: Tensor, scale: Tensor, initial_std: float) -> None:
        super().__init__()
        self.mean = mean
        self.log_std = nn.Parameter(torch.full_like(scale, math.log(initial_std)))
        self.register_buffer("centre", centre)
        self.register_buffer("scale", scale)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [N, d] and the log of the standard deviation [d]."""
        mean = self.centre + self.scale * self.mean(observations)
        return mean, self.log_std + self.scale.log()


def make_networks(
    config: NetworkModel, observations: spaces.Space[Any], actions: spaces.Space[Any]
) -> tuple[nn.Module, nn.Module]:
    """Return actor and critic, with weights from torch's random generator."""
    if config.make is not None:
        return _make_user_networks(config.make, observations, actions)
    head = make_head(actions)
    actor: nn.Module = _make_perceptron(config, observations, head.num_outputs, _ACTOR_OUTPUT_GAIN)
    if isinstance(head, NormalHead):
        actor = add_deviation(actor, actions, config.initial_std)
    return actor, _make_perceptron(config, observations, 1, 1.0)


def add_deviation(
    actor: nn.Module,
    space: spaces.Space[Any],
    initial_std: float,
    *,
    is_normalized: bool = True,
) -> GaussianActor:
    """Return the actor with a trained standard deviation.

    Args:
        is_normalized: whether the actor's outputs -1 and 1 mean the bounds of the space, for
            actions with bounds. Otherwise, its outputs are actions.
    """
    assert isinstance(space, spaces.Box)
    low, high = (torch.as_tensor(bound).flatten().float() for bound in (space.low, space.high))
    centre, scale = torch.zeros_like(low), torch.ones_like(low)
    is_bounded = torch.isfinite(low) & torch.isfinite(high) & (high > low)
    if is_normalized:
        centre = torch.where(is_bounded, (low + high) / 2, centre)
        scale = torch.where(is_bounded, (high - low) / 2, scale)
    return GaussianActor(actor, centre, scale, initial_std)


def complete_actor(
    actor: nn.Module, head: Head, space: spaces.Space[Any], example: Tensor
) -> nn.Module:
    """Add a deviation to an actor that returns only the means of continuous actions."""
    if not isinstance(head, NormalHead):
        return actor
    with torch.no_grad():
        output: Output = actor(example)
    if isinstance(output, Tensor) and output.shape[-1] == head.num_outputs:
        return add_deviation(actor, space, 1.0, is_normalized=False)
    return actor


def _make_perceptron(
    config: NetworkModel, space: spaces.Space[Any], num_outputs: int, gain: float
) -> nn.Sequential:
    """Return a perceptron with orthogonal weights, as in `ppo2` of github.com/openai/baselines."""
    features = Features(space)
    widths = [features.width, *config.hidden]
    layers: list[nn.Module] = [features]
    for num_inputs, width in pairwise(widths):
        layers += [_make_linear(num_inputs, width, math.sqrt(2)), _ACTIVATIONS[config.activation]()]
    return nn.Sequential(*layers, _make_linear(widths[-1], num_outputs, gain))


def _make_linear(num_inputs: int, num_outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _make_user_networks(
    path: str, observations: spaces.Space[Any], actions: spaces.Space[Any]
) -> tuple[nn.Module, nn.Module]:
    networks = import_object(path, "model.make")(observations, actions)
    match networks:
        case (nn.Module() as actor, nn.Module() as critic):
            return actor, critic
    raise ConfigError(
        f"model.make = '{path}' must be a function (observation_space, action_space) -> (actor, "
        f"critic) that returns two torch modules, but it returned {type(networks).__name__}"
    )
