"""The arguments of a call of `train_agent`, and the interface of the code that runs it.

train_agent(...) --AgentRequest--+-- actor.train_as_agent(request)   a language model
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
"""A function of (state, action, reward, done, truncated, episode, running_reward)."""

_CALLBACK_PARAMETERS = "state, action, reward, done, truncated, episode, running_reward"
RUNNING_WEIGHT = 0.05
"""Weight of the newest return in the running average."""
_MAX_NAME_LENGTH = 40
_COUNTS = (
    *("max_episodes", "max_timesteps", "update_interval"),
    *("save_interval", "log_interval", "num_envs"),
)


_ARGUMENT_TYPES: Mapping[str, tuple[type, str]] = {
    "env_name": (str, "a Gymnasium id, 'module:id' or a server's address"),
    "actor": (nn.Module, "a torch module"),
    "critic": (nn.Module, "a torch module"),
    "ppo_config": (PPOConfig, f"a {PPOConfig.__module__}.PPOConfig"),
    "metrics": (Mapping, "a mapping of metric sinks"),
}


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """Arguments of one call of `train_agent`."""

    env_name: str
    """Gymnasium id, `module:id`, or address of an environment server."""
    actor: nn.Module
    critic: nn.Module
    ppo_config: PPOConfig
    max_episodes: int
    max_timesteps: int
    """Maximum number of steps per episode."""
    update_interval: int
    """Number of episodes between two updates."""
    save_interval: int
    """Number of episodes between two saved agents."""
    save_path: Path
    """Parent folder of the run folder and of saved agents."""
    callback: Callback | None
    log_interval: int
    """Number of episodes between two calls of `callback`."""
    device: str | None
    """Name of a torch device. None uses the CPU, on which small networks are faster."""
    num_envs: int
    """Number of episodes played in parallel."""
    seed: int
    name: str | None = None
    """Name of the run; None uses the name of the environment."""
    resume: bool = False
    """True to resume the run of that name instead of replacing it."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Section `metrics` of the run's configuration."""

    def __post_init__(self) -> None:
        """Raise ConfigError if an argument has the wrong type or is out of range."""
        for name, (expected_type, description) in _ARGUMENT_TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, expected_type):
                raise ConfigError(f"{name} must be {description}, got {value!r:.80}")
        check_callback("callback", self.callback, _CALLBACK_PARAMETERS)
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        check_count("seed", self.seed, min_value=0)
        check_run_name(self.name)
        check_flag("resume", self.resume)

    @property
    def run_name(self) -> str:
        """Name of the run folder in `save_path`."""
        if self.name is not None:
            return self.name
        safe_name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.env_name.rpartition(":")[2]).strip("-.")
        return safe_name[:_MAX_NAME_LENGTH] or "agent"


@runtime_checkable
class SelfTrainingActor(Protocol):
    """An actor with its own training method, such as a language model."""

    def train_as_agent(self, request: AgentRequest) -> EpisodeReturns:
        """Train the actor and return the returns of the requested episodes."""


class EpisodeReturns(list[float]):
    """Returns of the episodes, in the order in which they ended."""

    @property
    def running(self) -> list[float]:
        """Gymformer's running average after each episode."""
        return list(running_average(self))


def running_average(returns: Iterable[float]) -> Iterable[float]:
    """Yield Gymformer's running average, which starts at 0, after each return."""
    average = 0.0
    for value in returns:
        average += RUNNING_WEIGHT * (value - average)
        yield average
