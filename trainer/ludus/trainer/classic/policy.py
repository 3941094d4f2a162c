"""Actor and critic as one policy, with the statistics of what they have seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ludus.proto.errors import ConfigError
from ludus.trainer.classic.heads import check_output, head_of
from ludus.trainer.classic.networks import completed_actor

_EPS = 1e-8
_FARTHEST = 10.0
"""Normalised observations are held within so many deviations."""
_NUM_EXAMPLES = 2


class Policy(nn.Module):
    """What is trained: an actor, a critic, and the normaliser of what both see."""

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
        """Put them together.

        Raises:
            ConfigError: the modules do not fit the spaces, or PPO cannot act or see there.
        """
        super().__init__()
        self.head = head_of(action_space)
        self.device = _device_of(device)
        self._is_whole = _is_whole(observation_space)
        example = self.to_tensor(np.stack([observation_space.sample()] * _NUM_EXAMPLES))
        actor, critic = actor.to(self.device), critic.to(self.device)
        self.actor = _tried(
            lambda: completed_actor(actor, self.head, action_space, example), "actor", example
        ).to(self.device)
        self.critic = critic
        self.normaliser = (
            Moments(observation_space.shape or ()).to(self.device) if normalises else None
        )
        with torch.no_grad():
            output = _tried(lambda: self.actor(example), "actor", example)
            values = _tried(lambda: self.critic(example), "critic", example)
        check_output(output, self.head, _NUM_EXAMPLES)
        if values.numel() != _NUM_EXAMPLES:
            raise ConfigError(
                f"the critic expected to return one value for each state, got shape "
                f"{list(values.shape)} for {_NUM_EXAMPLES} states; give its last layer one output"
            )

    def to_tensor(self, observations: np.ndarray) -> Tensor:
        """Observations as the modules see them: whole numbers as int64, all others as float32."""
        kind = torch.int64 if self._is_whole else torch.float32
        return torch.from_numpy(np.ascontiguousarray(observations)).to(self.device, kind)

    def prepared(self, observations: Tensor) -> Tensor:
        """The observations, normalised where the policy does that."""
        return observations if self.normaliser is None else self.normaliser(observations)

    @torch.no_grad()
    def act(self, observations: np.ndarray, noise: Tensor | None) -> Tensor:
        """Actions [N, ...] as they are trained on; the likeliest ones without noise."""
        output = self.actor(self.prepared(self.to_tensor(observations)))
        return self.head.likeliest(output) if noise is None else self.head.choose(output, noise)

    @torch.no_grad()
    def values(self, observations: Tensor) -> Tensor:
        """The critic's values [N] of prepared observations."""
        values: Tensor = self.critic(observations)
        return values.reshape(len(observations))

    def see(self, observations: Tensor) -> None:
        """Take raw observations [N, ...] into the normaliser's statistics."""
        if self.normaliser is not None:
            self.normaliser.take(observations)


class Moments(nn.Module):
    """Mean and variance of all that was taken in; they shift and scale what passes."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def take(self, values: Tensor) -> None:
        """Take in the values [N, ...].

        Two parts make a whole as in Chan, Golub and LeVeque (1979), "Updating Formulae and a
        Pairwise Algorithm for Computing Sample Variances".
        """
        values = values.double()
        num, mean = len(values), values.mean(0)
        variance = values.var(0, correction=0)
        whole = self.count + num
        away = mean - self.mean
        squares = self.variance * self.count + variance * num
        squares = squares + away.square() * self.count * num / whole
        self.mean += away * num / whole
        self.variance.copy_(squares / whole)
        self.count.copy_(whole)

    def forward(self, values: Tensor) -> Tensor:
        """Values with mean 0 and deviation 1, held within ten deviations."""
        scaled = (values - self.mean) / (self.variance + _EPS).sqrt()
        return scaled.clamp(-_FARTHEST, _FARTHEST).float()


def _tried(call: Any, what: str, example: Tensor) -> Any:
    """What the user's module returns; what it cannot take is told by what it was given."""
    try:
        return call()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the {what} cannot take observations of shape {list(example.shape)} and type "
            f"{example.dtype}: {error}"
        ) from error


def _device_of(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: there is none here.
    """
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = '{name}' cannot be used: {reason}; take 'cpu'") from error


def _is_whole(space: spaces.Space[Any]) -> bool:
    match space:
        case spaces.Discrete() | spaces.MultiDiscrete():
            return True
        case spaces.Box() | spaces.MultiBinary():
            return False
    raise ConfigError(
        "expected observations of Box, Discrete, MultiDiscrete or MultiBinary, got "
        f"{space}; wrap the environment, for example with gymnasium.wrappers.FlattenObservation"
    )
