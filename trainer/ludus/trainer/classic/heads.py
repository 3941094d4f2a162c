"""Distributions over actions: categorical and normal.

A head belongs to one action space. The actor's output for N states:

    Discrete                     logits [N, n]
    MultiDiscrete, MultiBinary   concatenated logits [N, sum of the n]
    Box                          mean [N, d] and log of the standard deviation [N, d] or [d], as a
                                 pair, or concatenated in one tensor [N, 2d]

Noise is sampled separately from actions, so that the noise of many steps can be sampled at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ludus.proto.errors import ConfigError
from ludus.trainer.algorithms.losses import entropy

ActorOutput = Tensor | tuple[Tensor, Tensor]
"""Output of an actor."""

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_LOG_STD_RANGE = (-20.0, 4.0)
"""Range in which exp(log_std) and the log-probs stay finite."""


class CategoricalHead:
    """A categorical distribution for each choice; a Discrete space has a single choice."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        self._shape = space.shape or ()
        self._first_actions = 0 if isinstance(space, spaces.MultiBinary) else space.start
        self._sizes = list_sizes(space)
        self._dtype = space.dtype
        self.num_outputs = sum(self._sizes)
        """Number of outputs of the actor per state."""

    def sample_noise(self, num_steps: int, num_states: int) -> Tensor:
        """Sample Gumbel noise. The argmax of logits plus noise has the softmax distribution."""
        # Exponential samples are never 0. -log(-log(u)) of a uniform sample u may overflow.
        return -torch.empty(num_steps, num_states, self.num_outputs).exponential_().log_()

    def choose(self, output: ActorOutput, noise: Tensor | None) -> Tensor:
        """Return actions, counted from 0: [N] for a Discrete space, otherwise [N, num_choices].

        Without noise, they are the most probable actions.
        """
        logits = _select_logits(output)
        if noise is not None:
            logits = logits + noise
        choices = [choice_logits.argmax(-1) for choice_logits in logits.split(self._sizes, -1)]
        return torch.stack(choices, -1) if self._shape else choices[0]

    def score(self, output: ActorOutput, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, summed over all choices, both [N]."""
        choices = [
            logits.log_softmax(-1) for logits in _select_logits(output).split(self._sizes, -1)
        ]
        indices = actions.view(len(actions), -1, 1).unbind(1)
        logprobs = [
            choice.gather(-1, index)[:, 0] for choice, index in zip(choices, indices, strict=True)
        ]
        entropies = [entropy(choice) for choice in choices]
        return torch.stack(logprobs).sum(0), torch.stack(entropies).sum(0)

    def to_environment_actions(self, actions: np.ndarray) -> np.ndarray:
        """Return the actions in the shape of the space, counted from the space's first actions."""
        environment_actions = actions.reshape(len(actions), *self._shape) + self._first_actions
        return environment_actions.astype(self._dtype, copy=False)


class NormalHead:
    """Continuous actions with independent normal distributions.

    Actions outside of the bounds of the space are clipped for the environment. Log-probs are those
    of the actions before clipping.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._low, self._high = space.low, space.high
        self._shape = space.shape
        self._dtype = space.dtype
        self.num_outputs = math.prod(space.shape)
        """Number of means that the actor returns per state."""

    def sample_noise(self, num_steps: int, num_states: int) -> Tensor:
        """Sample standard normal noise."""
        return torch.randn(num_steps, num_states, self.num_outputs)

    def choose(self, output: ActorOutput, noise: Tensor | None) -> Tensor:
        """Return actions [N, d]; without noise, the means."""
        mean, log_std = self._split_parameters(output)
        return mean if noise is None else mean + noise * log_std.exp()

    def score(self, output: ActorOutput, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-densities and entropies, both [N]."""
        mean, log_std = self._split_parameters(output)
        distance = (actions - mean) * (-log_std).exp()
        logprobs = (-0.5 * distance.square() - log_std - _HALF_LOG_TWO_PI).sum(-1)
        entropies = (log_std + (0.5 + _HALF_LOG_TWO_PI)).sum(-1).expand(len(mean))
        return logprobs, entropies

    def to_environment_actions(self, actions: np.ndarray) -> np.ndarray:
        """Return the actions in the shape of the space, clipped to its bounds."""
        environment_actions = actions.reshape(len(actions), *self._shape)
        return np.clip(environment_actions, self._low, self._high).astype(self._dtype, copy=False)

    def _split_parameters(self, output: ActorOutput) -> tuple[Tensor, Tensor]:
        mean, log_std = output if isinstance(output, tuple) else output.chunk(2, -1)
        return mean, log_std.clamp(*_LOG_STD_RANGE)


Head = CategoricalHead | NormalHead
"""A distribution over the actions of one action space."""


def make_head(space: spaces.Space[Any]) -> Head:
    """Return the head of an action space."""
    match space:
        case spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return CategoricalHead(space)
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return NormalHead(space)
    raise ConfigError(
        "the action space must be Discrete, MultiDiscrete, MultiBinary or a Box of floats, got "
        f"{space}; wrap the environment, for example with gymnasium.wrappers.TransformAction"
    )


def list_sizes(space: spaces.Space[Any]) -> list[int]:
    """Return the number of options of each choice in a space; empty for a Box."""
    match space:
        case spaces.Discrete():
            return [int(space.n)]
        case spaces.MultiDiscrete():
            return [int(size) for size in space.nvec.ravel()]
        case spaces.MultiBinary():
            return [2] * math.prod(space.shape)
    return []


def sample_uniform_actions(space: spaces.Space[Any], head: Head, num_actions: int) -> Tensor:
    """Sample actions [num_actions, ...] from the uniform distribution.

    Continuous actions without bounds have a standard normal distribution.
    """
    if not isinstance(space, spaces.Box):
        logits = torch.zeros(num_actions, head.num_outputs)
        return head.choose(logits, head.sample_noise(1, num_actions)[0])
    low, high = (torch.as_tensor(bound).flatten().float() for bound in (space.low, space.high))
    is_bounded = low.isfinite() & high.isfinite()
    fractions = torch.rand(num_actions, head.num_outputs)
    actions = low.nan_to_num(posinf=0, neginf=0) * (1 - fractions)
    actions = actions + high.nan_to_num(posinf=0, neginf=0) * fractions
    return torch.where(is_bounded, actions, torch.randn(num_actions, head.num_outputs))


def _select_logits(output: ActorOutput) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def check_output(output: Any, head: Head, num_states: int) -> None:
    """Check the shape of an actor's output."""
    tensors: Sequence[Any] = output if isinstance(output, tuple) else (output,)
    shapes = [
        list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor) for tensor in tensors
    ]
    expected_shape, is_normal = [num_states, head.num_outputs], isinstance(head, NormalHead)
    if is_normal and not isinstance(output, tuple):
        expected_shape = [num_states, 2 * head.num_outputs]
    if shapes[0] == expected_shape and len(shapes) == 1 + isinstance(output, tuple):
        return
    description = "mean and log of the deviation" if is_normal else "logits"
    raise ConfigError(
        f"the actor must return {description} of shape {expected_shape} for {num_states} states, "
        f"got {shapes}; give its last layer {expected_shape[-1]} outputs"
    )
