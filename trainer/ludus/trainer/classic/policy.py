"""A policy of an actor and a critic, with the statistics of its observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ludus.proto.errors import ConfigError
from ludus.trainer.classic.heads import check_output, make_head
from ludus.trainer.classic.networks import complete_actor
from ludus.trainer.core.devices import choose_device

_EPS = 1e-8
_MAX_DEVIATIONS = 10.0
"""Limit of normalized observations, in standard deviations."""
_NUM_EXAMPLES = 2


class NetworkPolicy(nn.Module):
    """An actor, a critic, and the normalization of their observations."""

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        normalises: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.head = make_head(action_space)
        self.device = choose_device(device)
        self._is_discrete = _is_discrete(observation_space)
        example = self.to_tensor(np.stack([observation_space.sample()] * _NUM_EXAMPLES))
        actor, critic = actor.to(self.device), critic.to(self.device)
        self.actor = _call_module(
            lambda: complete_actor(actor, self.head, action_space, example), "actor", example
        ).to(self.device)
        self.critic = critic
        self.normaliser = (
            RunningMoments(observation_space.shape or ()).to(self.device) if normalises else None
        )
        with torch.no_grad():
            output = _call_module(lambda: self.actor(example), "actor", example)
            values = _call_module(lambda: self.critic(example), "critic", example)
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

    def prepare(self, observations: Tensor) -> Tensor:
        """Normalize the observations if the policy does so."""
        return observations if self.normaliser is None else self.normaliser(observations)

    @torch.no_grad()
    def act(self, observations: np.ndarray, noise: Tensor | None) -> Tensor:
        """Return actions [N, ...] in the policy's form.

        Args:
            noise: noise of the head. None takes the most probable actions.
        """
        output = self.actor(self.prepare(self.to_tensor(observations)))
        return (
            self.head.choose_most_probable(output)
            if noise is None
            else self.head.choose(output, noise)
        )

    @torch.no_grad()
    def values(self, observations: Tensor) -> Tensor:
        """Return the critic's values [N] of prepared observations."""
        values: Tensor = self.critic(observations)
        return values.reshape(len(observations))

    def update_statistics(self, observations: Tensor) -> None:
        """Add observations [N, ...], not normalized, to the statistics."""
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
        squares = self.variance * self.count + variance * num_values
        squares = squares + delta.square() * self.count * num_values / count
        self.mean += delta * num_values / count
        self.variance.copy_(squares / count)
        self.count.copy_(count)

    def forward(self, values: Tensor) -> Tensor:
        """Return values with mean 0 and deviation 1, clipped to ten deviations."""
        scaled = (values - self.mean) / (self.variance + _EPS).sqrt()
        return scaled.clamp(-_MAX_DEVIATIONS, _MAX_DEVIATIONS).float()


def _call_module(call: Callable[[], Any], name: str, example: Tensor) -> Any:
    """Return the result of a user's module, or report its observations if it fails."""
    try:
        return call()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the {name} failed with observations of shape {list(example.shape)} and type "
            f"{example.dtype}: {error}"
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
