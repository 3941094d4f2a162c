"""What a call of `train_agent` asks for, and who answers it.

train_agent(...) --AgentRequest--+-- actor.train_as_agent(request)   it brings its trainer
                                 +-- classic PPO                     any other torch module
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.arguments import (
    check_callback,
    check_count,
    check_flag,
    check_run_name,
)
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig

Callback = Callable[[Any, Any, float, bool, bool, int, float], object]
"""Called with (state, action, reward, done, truncated, episode, running_reward)."""

_TOLD = "state, action, reward, done, truncated, episode, running_reward"
_RUNNING_WEIGHT = 0.05
_MAX_NAME = 40
_COUNTS = (
    *("max_episodes", "max_timesteps", "update_interval"),
    *("save_interval", "log_interval", "num_envs"),
)


_KINDS: Mapping[str, tuple[type, str]] = {
    "env_name": (str, "a Gymnasium id, 'module:id', or a server's address"),
    "actor": (nn.Module, "a torch module"),
    "critic": (nn.Module, "a torch module"),
    "ppo_config": (PPOConfig, f"a {PPOConfig.__module__}.PPOConfig"),
    "metrics": (Mapping, "sinks by name"),
}


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """The arguments of one `train_agent`."""

    env_name: str
    """A Gymnasium id, `module:id`, or the address of an environment server."""
    actor: nn.Module
    critic: nn.Module
    ppo_config: PPOConfig
    max_episodes: int
    max_timesteps: int
    """Longest episode."""
    update_interval: int
    """Episodes between two updates."""
    save_interval: int
    """Episodes between two saved agents."""
    save_path: Path
    """Of the run's folder, and of agents that are saved."""
    callback: Callback | None
    log_interval: int
    """Episodes between two calls of `callback`."""
    device: str | None
    """Null is the CPU: small networks are faster there."""
    num_envs: int
    """Episodes that are played side by side."""
    seed: int
    name: str | None = None
    """Of the run; None is the environment's."""
    resume: bool = False
    """Whether the run of that name goes on, instead of being replaced."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Section `metrics` of the run: its sinks."""

    def __post_init__(self) -> None:
        """Raises: ConfigError: an argument is not of its kind, or a number is out of range."""
        for what, (kind, said) in _KINDS.items():
            value = getattr(self, what)
            if not isinstance(value, kind):
                raise ConfigError(f"{what} expected {said}, got {value!r:.80}")
        check_callback("callback", self.callback, _TOLD)
        for what in _COUNTS:
            check_count(what, getattr(self, what))
        check_count("seed", self.seed, least=0)
        check_run_name(self.name)
        check_flag("resume", self.resume)

    @property
    def run_name(self) -> str:
        """The name of the run's folder in `save_path`."""
        if self.name is not None:
            return self.name
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.env_name.rpartition(":")[2]).strip("-.")
        return plain[:_MAX_NAME] or "agent"


@runtime_checkable
class TrainsAsAgent(Protocol):
    """An actor that classic PPO cannot train, and that brings what can: a language model."""

    def train_as_agent(self, request: AgentRequest) -> EpisodeReturns:
        """The returns of the episodes that `request` asked for."""


class EpisodeReturns(list[float]):
    """The return of each episode, in the order in which they ended."""

    @property
    def running(self) -> list[float]:
        """After each episode the average that Gymformer returns: from 0, 5 % of each return."""
        return list(running_average(self))


def running_average(returns: Iterable[float]) -> Iterable[float]:
    """Gymformer's average after each of the returns."""
    average = 0.0
    for value in returns:
        average += _RUNNING_WEIGHT * (value - average)
        yield average
