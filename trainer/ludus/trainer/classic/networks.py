"""The modules that are trained: perceptrons made from a configuration, or the user's own."""

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
from ludus.trainer.classic.heads import Head, NormalHead, Output, head_of
from ludus.trainer.core.functions import import_object

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_LAST_GAIN = 0.01
"""Of the actor's output: it begins near a uniform policy, whatever the state."""
_MAX_CHOICES = 4096


class Features(nn.Module):
    """Observations as rows of floats: numbers are laid out flat, one of n becomes n columns."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self._sizes: list[int] = []
        match space:
            case spaces.Discrete():
                self._sizes = [int(space.n)]
            case spaces.MultiDiscrete():
                self._sizes = [int(size) for size in np.ravel(space.nvec)]
        self.width = sum(self._sizes) or math.prod(space.shape or ())
        if self.width > _MAX_CHOICES and self._sizes:
            raise ConfigError(
                f"a perceptron expected at most {_MAX_CHOICES} different observations, got "
                f"{self.width}; name networks of your own with model.make"
            )

    def forward(self, observations: Tensor) -> Tensor:
        """Rows [N, width]."""
        if not self._sizes:
            return observations.flatten(1).float()
        columns = observations.reshape(len(observations), -1)
        parts = [nn.functional.one_hot(columns[:, i], n) for i, n in enumerate(self._sizes)]
        return torch.cat(parts, -1).float()


class WithDeviation(nn.Module):
    """An actor of means, with a standard deviation that is trained and the same in all states.

    Means and deviation are in units of `scale` around `centre`, those of the action space.
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
        """Mean [N, d] and log of the standard deviation [d]."""
        mean = self.centre + self.scale * self.mean(observations)
        return mean, self.log_std + self.scale.log()


def make_networks(
    config: NetworkModel, observations: spaces.Space[Any], actions: spaces.Space[Any]
) -> tuple[nn.Module, nn.Module]:
    """Actor and critic, with weights from torch's generator.

    Raises:
        ConfigError: the user's function does not return two modules.
    """
    if config.make is not None:
        return _users_own(config.make, observations, actions)
    head = head_of(actions)
    actor: nn.Module = _perceptron(config, observations, head.num_outputs, _LAST_GAIN)
    if isinstance(head, NormalHead):
        actor = with_deviation(actor, actions, config.initial_std)
    return actor, _perceptron(config, observations, 1, 1.0)


def with_deviation(
    actor: nn.Module,
    space: spaces.Space[Any],
    initial_std: float,
    *,
    in_units_of_space: bool = True,
) -> WithDeviation:
    """An actor of means with a deviation beside them.

    Args:
        in_units_of_space: whether the actor says -1 for the lower and 1 for the upper bound of
            the space, where it has bounds; or the action itself.
    """
    assert isinstance(space, spaces.Box)
    low, high = (torch.as_tensor(bound).flatten().float() for bound in (space.low, space.high))
    centre, scale = torch.zeros_like(low), torch.ones_like(low)
    bounded = torch.isfinite(low) & torch.isfinite(high) & (high > low)
    if in_units_of_space:
        centre = torch.where(bounded, (low + high) / 2, centre)
        scale = torch.where(bounded, (high - low) / 2, scale)
    return WithDeviation(actor, centre, scale, initial_std)


def completed_actor(
    actor: nn.Module, head: Head, space: spaces.Space[Any], example: Tensor
) -> nn.Module:
    """The actor; one that says nothing but means of continuous actions gets a deviation beside."""
    if not isinstance(head, NormalHead):
        return actor
    with torch.no_grad():
        output: Output = actor(example)
    if isinstance(output, Tensor) and output.shape[-1] == head.num_outputs:
        return with_deviation(actor, space, 1.0, in_units_of_space=False)
    return actor


def _perceptron(
    config: NetworkModel, space: spaces.Space[Any], num_outputs: int, gain: float
) -> nn.Sequential:
    """Orthogonal weights, as in https://github.com/openai/baselines, `ppo2`."""
    features = Features(space)
    widths = [features.width, *config.hidden]
    layers: list[nn.Module] = [features]
    for inputs, outputs in pairwise(widths):
        layers += [_linear(inputs, outputs, math.sqrt(2)), _ACTIVATIONS[config.activation]()]
    return nn.Sequential(*layers, _linear(widths[-1], num_outputs, gain))


def _linear(num_inputs: int, num_outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _users_own(
    path: str, observations: spaces.Space[Any], actions: spaces.Space[Any]
) -> tuple[nn.Module, nn.Module]:
    made = import_object(path, "model.make")(observations, actions)
    match made:
        case (nn.Module() as actor, nn.Module() as critic):
            return actor, critic
    raise ConfigError(
        f"model.make = '{path}' expected a function (observation_space, action_space) -> (actor, "
        f"critic), two torch modules, got {type(made).__name__}"
    )
