"""From what an actor says to actions: categorical, several categorical, and normal ones.

A head knows one action space. What it takes from an actor, for N states:

    Discrete                     logits [N, n]
    MultiDiscrete, MultiBinary   logits [N, sum of the n], one after the other
    Box                          mean [N, d] and log of the standard deviation [N, d] or [d], as a
                                 pair, or side by side in one tensor [N, 2d]

Noise is drawn apart from the choice, so that all of a rollout can be drawn at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ludus.proto.errors import ConfigError
from ludus.trainer.algorithms.logits import entropy

Output = Tensor | tuple[Tensor, Tensor]
"""What an actor returns."""

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_LOG_STD_RANGE = (-20.0, 4.0)
"""Keeps exp() away from 0 and infinity, where log-probs are no numbers."""


class Head(Protocol):
    """The distribution over one action space."""

    num_outputs: int
    """Numbers that an actor has to say of one state, but for deviations."""

    def noise(self, num_steps: int, num_states: int) -> Tensor:
        """What `choose` needs for so many steps in so many environments, from torch's generator."""

    def choose(self, output: Output, noise: Tensor) -> Tensor:
        """Actions [N, ...] drawn from the distribution, by the noise of one step."""

    def likeliest(self, output: Output) -> Tensor:
        """The likeliest actions [N, ...]."""

    def judge(self, output: Output, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probs of the actions, and the entropies; both [N]."""

    def to_environment(self, actions: np.ndarray) -> np.ndarray:
        """The actions as the space has them."""


class CategoricalHead:
    """One of n actions."""

    def __init__(self, space: spaces.Discrete) -> None:
        self.num_outputs = int(space.n)
        self._start = space.start
        self._dtype = space.dtype

    def noise(self, num_steps: int, num_states: int) -> Tensor:
        """Gumbel noise: the largest of logits plus it is a draw from their softmax."""
        return _gumbel(num_steps, num_states, self.num_outputs)

    def choose(self, output: Output, noise: Tensor) -> Tensor:
        """Actions [N], from 0."""
        return (_logits(output) + noise).argmax(-1)

    def likeliest(self, output: Output) -> Tensor:
        """The likeliest actions [N]."""
        return _logits(output).argmax(-1)

    def judge(self, output: Output, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, both [N]."""
        logprobs = _logits(output).log_softmax(-1)
        chosen = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return chosen, entropy(logprobs)

    def to_environment(self, actions: np.ndarray) -> np.ndarray:
        """The actions, counted from the first one of the space."""
        return (actions + self._start).astype(self._dtype, copy=False)


class MultiCategoricalHead:
    """One of n actions for each of several things."""

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        counts, self._start = np.full(space.shape, 2), np.zeros(space.shape, dtype=np.int64)
        if isinstance(space, spaces.MultiDiscrete):
            counts, self._start = np.asarray(space.nvec), np.asarray(space.start)
        self._sizes = [int(size) for size in counts.ravel()]
        self._shape = space.shape or ()
        self._dtype = space.dtype
        self.num_outputs = sum(self._sizes)

    def noise(self, num_steps: int, num_states: int) -> Tensor:
        """Gumbel noise for all logits."""
        return _gumbel(num_steps, num_states, self.num_outputs)

    def choose(self, output: Output, noise: Tensor) -> Tensor:
        """Actions [N, number of things], each from 0."""
        return self._largest(_logits(output) + noise)

    def likeliest(self, output: Output) -> Tensor:
        """The likeliest actions [N, number of things]."""
        return self._largest(_logits(output))

    def judge(self, output: Output, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all things together, both [N]."""
        parts = [part.log_softmax(-1) for part in _logits(output).split(self._sizes, -1)]
        chosen = [part.gather(-1, actions[:, i, None])[:, 0] for i, part in enumerate(parts)]
        return torch.stack(chosen).sum(0), torch.stack([entropy(part) for part in parts]).sum(0)

    def to_environment(self, actions: np.ndarray) -> np.ndarray:
        """The actions in the shape of the space, counted from its first ones."""
        shaped = actions.reshape(len(actions), *self._shape) + self._start
        return shaped.astype(self._dtype, copy=False)

    def _largest(self, logits: Tensor) -> Tensor:
        return torch.stack([part.argmax(-1) for part in logits.split(self._sizes, -1)], -1)


class NormalHead:
    """Continuous actions, each from a normal distribution of its own.

    What is drawn beyond the bounds of the space is held at them on its way to the environment;
    log-probs are those of what was drawn.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._low, self._high = space.low, space.high
        self._shape = space.shape
        self._dtype = space.dtype
        self.num_outputs = math.prod(space.shape)

    def noise(self, num_steps: int, num_states: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(num_steps, num_states, self.num_outputs)

    def choose(self, output: Output, noise: Tensor) -> Tensor:
        """Actions [N, d]."""
        mean, log_std = self._parameters(output)
        return mean + noise * log_std.exp()

    def likeliest(self, output: Output) -> Tensor:
        """The means [N, d]."""
        return self._parameters(output)[0]

    def judge(self, output: Output, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-densities and entropies in nats, both [N]."""
        mean, log_std = self._parameters(output)
        distance = (actions - mean) * (-log_std).exp()
        logprobs = (-0.5 * distance.square() - log_std - _HALF_LOG_TWO_PI).sum(-1)
        entropies = (log_std + (0.5 + _HALF_LOG_TWO_PI)).sum(-1).expand(len(mean))
        return logprobs, entropies

    def to_environment(self, actions: np.ndarray) -> np.ndarray:
        """The actions in the shape of the space, held within its bounds."""
        shaped = actions.reshape(len(actions), *self._shape)
        return np.clip(shaped, self._low, self._high).astype(self._dtype, copy=False)

    def _parameters(self, output: Output) -> tuple[Tensor, Tensor]:
        mean, log_std = output if isinstance(output, tuple) else output.chunk(2, -1)
        return mean, log_std.clamp(*_LOG_STD_RANGE)


def head_of(space: spaces.Space[Any]) -> Head:
    """The head for an action space.

    Raises:
        ConfigError: PPO has none for it.
    """
    match space:
        case spaces.Discrete():
            return CategoricalHead(space)
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            return MultiCategoricalHead(space)
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return NormalHead(space)
    raise ConfigError(
        "expected an action space of Discrete, MultiDiscrete, MultiBinary or a Box of floats, got "
        f"{space}; wrap the environment, for example with gymnasium.wrappers.TransformAction"
    )


def uniform_actions(space: spaces.Space[Any], head: Head, num: int) -> Tensor:
    """Actions [num, ...] of the random policy: each as likely as any other within the bounds.

    Where a continuous action has no bounds, it is drawn from the standard normal distribution.
    """
    if not isinstance(space, spaces.Box):
        return head.choose(torch.zeros(num, head.num_outputs), head.noise(1, num)[0])
    low, high = (torch.as_tensor(bound).flatten().float() for bound in (space.low, space.high))
    is_bounded = low.isfinite() & high.isfinite()
    share = torch.rand(num, head.num_outputs)
    within = low.nan_to_num(posinf=0, neginf=0) * (1 - share)
    within = within + high.nan_to_num(posinf=0, neginf=0) * share
    return torch.where(is_bounded, within, torch.randn(num, head.num_outputs))


def _logits(output: Output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _gumbel(*shape: int) -> Tensor:
    # Of exponential numbers, which are never 0: -log(-log(u)) of a uniform one might overflow.
    return -torch.empty(shape).exponential_().log_()


def check_output(output: Any, head: Head, num_states: int) -> None:
    """Refuse an actor whose output the head cannot read.

    Raises:
        ConfigError: it says something else than the space wants.
    """
    parts: Sequence[Any] = output if isinstance(output, tuple) else (output,)
    shapes = [list(part.shape) if isinstance(part, Tensor) else type(part) for part in parts]
    wanted, is_normal = [num_states, head.num_outputs], isinstance(head, NormalHead)
    if is_normal and not isinstance(output, tuple):
        wanted = [num_states, 2 * head.num_outputs]
    if shapes[0] == wanted and len(shapes) == 1 + isinstance(output, tuple):
        return
    what = "mean and log of the deviation" if is_normal else "logits"
    raise ConfigError(
        f"the actor expected to return {what} of shape {wanted} for {num_states} states, got "
        f"{shapes}; give its last layer {wanted[-1]} outputs"
    )
