"""A policy of an actor and a critic, with the statistics of its observations.

Actor and critic are perceptrons made from the configuration, or the user's modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ludus.proto.config import NetworkModel
from ludus.proto.errors import ConfigError
from ludus.trainer.classic.heads import (
    ActorOutput,
    Head,
    NormalHead,
    check_output,
    list_sizes,
    make_head,
)
from ludus.trainer.core.devices import choose_device
from ludus.trainer.core.functions import import_callable

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_ACTOR_OUTPUT_GAIN = 0.01
"""Gain of the actor's last layer. With a small gain, the initial policy is nearly uniform."""
_MAX_ONE_HOT_WIDTH = 4096
_VARIANCE_EPS = 1e-8
_MAX_DEVIATIONS = 10.0
"""Limit of normalized observations, in standard deviations."""
_NUM_EXAMPLES = 2


class NetworkPolicy(nn.Module):
    """An actor, a critic, and the normalization of their observations.

    The modules stay in evaluation mode, also in updates: without dropout, old and new log-probs are
    comparable, and BatchNorm keeps its statistics.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        normalizes_observations: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.head = make_head(action_space)
        self.device = choose_device(device)
        self._is_discrete = _is_discrete(observation_space)
        examples = self.to_tensor(np.stack([observation_space.sample()] * _NUM_EXAMPLES))
        actor, self.critic = actor.eval().to(self.device), critic.eval().to(self.device)
        self.actor = _call_module(
            lambda: _complete_actor(actor, self.head, action_space, examples), "actor", examples
        ).to(self.device)
        self.normaliser = (
            RunningMoments(observation_space.shape or ()).to(self.device)
            if normalizes_observations and not self._is_discrete
            else None
        )
        with torch.no_grad():
            output = _call_module(lambda: self.actor(examples), "actor", examples)
            values = _call_module(lambda: self.critic(examples), "critic", examples)
        check_output(output, self.head, _NUM_EXAMPLES)
        if values.numel() != _NUM_EXAMPLES:
            raise ConfigError(
                f"the critic must return one value per state, got shape {list(values.shape)} for "
                f"{_NUM_EXAMPLES} states; give its last layer one output"
            )

    def to_tensor(self, observations: np.ndarray) -> Tensor:
        """Convert observations to int64 if they are discrete, otherwise to float32."""
        dtype = torch.int64 if self._is_discrete else torch.float32
        return torch.from_numpy(np.ascontiguousarray(observations)).to(self.device, dtype)

    def normalize_observations(self, observations: Tensor) -> Tensor:
        """Return the observations, normalized if the policy normalizes them."""
        return observations if self.normaliser is None else self.normaliser(observations)

    @torch.no_grad()
    def act(self, observations: np.ndarray, noise: Tensor | None) -> Tensor:
        """Return actions [N, ...], before `to_environment_actions`.

        Args:
            noise: noise from the head's `sample_noise`; None selects the most probable actions.
        """
        output = self.actor(self.normalize_observations(self.to_tensor(observations)))
        return self.head.choose(output, noise)

    @torch.no_grad()
    def predict_values(self, observations: Tensor) -> Tensor:
        """Return the critic's values [N] of normalized observations."""
        predictions: Tensor = self.critic(observations)
        return predictions.reshape(len(observations))

    def update_statistics(self, observations: Tensor) -> None:
        """Add observations [N, ...], before normalization, to the statistics."""
        if self.normaliser is not None:
            self.normaliser.update(observations)


class RunningMoments(nn.Module):
    """Mean and variance of all values so far; normalizes values with them."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Add the values [N, ...].

        The formula is from Chan, Golub and LeVeque (1979), "Updating Formulae and a Pairwise
        Algorithm for Computing Sample Variances".
        """
        values = values.double()
        num_values, mean = len(values), values.mean(0)
        variance = values.var(0, correction=0)
        count = self.count + num_values
        delta = mean - self.mean
        sum_of_squares = self.variance * self.count + variance * num_values
        sum_of_squares = sum_of_squares + delta.square() * self.count * num_values / count
        self.mean += delta * num_values / count
        self.variance.copy_(sum_of_squares / count)
        self.count.copy_(count)

    def forward(self, values: Tensor) -> Tensor:
        """Scale values to mean 0 and deviation 1, and clip them at ten deviations."""
        normalized_values = (values - self.mean) / (self.variance + _VARIANCE_EPS).sqrt()
        return normalized_values.clamp(-_MAX_DEVIATIONS, _MAX_DEVIATIONS).float()


class ObservationEncoder(nn.Module):
    """A module that flattens observations to rows of floats; discrete values become one-hot."""

    starts: Tensor

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self._sizes = [] if isinstance(space, spaces.MultiBinary) else list_sizes(space)
        starts = np.atleast_1d(getattr(space, "start", 0)).astype(np.int64).ravel()
        self.register_buffer("starts", torch.from_numpy(starts), persistent=False)
        self.width = sum(self._sizes) or math.prod(space.shape or ())
        if self.width > _MAX_ONE_HOT_WIDTH and self._sizes:
            raise ConfigError(
                f"a perceptron supports at most {_MAX_ONE_HOT_WIDTH} different observations, got "
                f"{self.width}; set model.make to a function that makes other networks"
            )

    def forward(self, observations: Tensor) -> Tensor:
        """Return rows [N, width]."""
        if not self._sizes:
            return observations.reshape(len(observations), -1).float()
        columns = (observations.reshape(len(observations), -1) - self.starts).unbind(1)
        features = map(nn.functional.one_hot, columns, self._sizes)
        return torch.cat(list(features), -1).float()


class GaussianActor(nn.Module):
    """An actor with a trained standard deviation that does not depend on the state.

    The inner module's mean is multiplied by `scale` and added to `centre`. The deviation is
    multiplied by `scale` too.
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
        actor = _add_deviation(actor, actions, config.initial_std)
    return actor, _make_perceptron(config, observations, 1, 1.0)


def _add_deviation(
    actor: nn.Module, space: spaces.Space[Any], initial_std: float, *, is_normalized: bool = True
) -> GaussianActor:
    """Return the actor with a trained standard deviation.

    Args:
        is_normalized: whether the actor's outputs -1 and 1 stand for the bounds of the space, if
            it has bounds. Otherwise, its outputs are actions.
    """
    assert isinstance(space, spaces.Box)
    low, high = (torch.as_tensor(bound).flatten().float() for bound in (space.low, space.high))
    centre, scale = torch.zeros_like(low), torch.ones_like(low)
    is_bounded = torch.isfinite(low) & torch.isfinite(high) & (high > low)
    if is_normalized:
        centre = torch.where(is_bounded, (low + high) / 2, centre)
        scale = torch.where(is_bounded, (high - low) / 2, scale)
    return GaussianActor(actor, centre, scale, initial_std)


def _complete_actor(
    actor: nn.Module, head: Head, space: spaces.Space[Any], examples: Tensor
) -> nn.Module:
    """Add a deviation to an actor that returns only the means of continuous actions."""
    if not isinstance(head, NormalHead):
        return actor
    with torch.no_grad():
        output: ActorOutput = actor(examples)
    if isinstance(output, Tensor) and output.shape[-1] == head.num_outputs:
        return _add_deviation(actor, space, 1.0, is_normalized=False)
    return actor


def _call_module(run_module: Callable[[], Any], name: str, examples: Tensor) -> Any:
    """Run a user's module and return its output; if it fails, report the observations' shape."""
    try:
        return run_module()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the {name} failed with observations of shape {list(examples.shape)} and type "
            f"{examples.dtype}: {error}"
        ) from error


def _is_discrete(space: spaces.Space[Any]) -> bool:
    match space:
        case spaces.Discrete() | spaces.MultiDiscrete():
            return True
        case spaces.Box() | spaces.MultiBinary():
            return False
    raise ConfigError(
        "the observation space must be Box, Discrete, MultiDiscrete or MultiBinary, got "
        f"{space}; wrap the environment, for example with gymnasium.wrappers.FlattenObservation"
    )


def _make_perceptron(
    config: NetworkModel, space: spaces.Space[Any], num_outputs: int, gain: float
) -> nn.Sequential:
    """Return a perceptron with orthogonal weights, as in `ppo2` of github.com/openai/baselines."""
    features = ObservationEncoder(space)
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
    networks = import_callable(path, "model.make")(observations, actions)
    match networks:
        case (nn.Module() as actor, nn.Module() as critic):
            return actor, critic
    raise ConfigError(
        f"model.make = '{path}' must be a function (observation_space, action_space) -> (actor, "
        f"critic) that returns two torch modules, but it returned {type(networks).__name__}"
    )
