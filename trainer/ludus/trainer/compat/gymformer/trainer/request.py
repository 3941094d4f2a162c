"""The arguments and the result of a call of `train_agent`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, InstanceOf, StringConstraints
from torch import nn

from ludus.proto.config.section import RUN_NAME_PATTERN, NonNegativeInt, PositiveInt
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.checks import Network, check_function, check_value, make_run_name
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig

Callback = Callable[[Any, Any, float, bool, bool, int, float], object]
"""A function of (state, action, reward, done, truncated, episode, running_reward)."""

_CALLBACK_PARAMETERS = tuple(
    ["state", "action", "reward", "done", "truncated", "episode", "running_reward"]
)
_RUNNING_WEIGHT = 0.05
"""Weight of the newest return in the running average."""
_RunName = Annotated[
    str,
    StringConstraints(pattern=RUN_NAME_PATTERN),
    Field(
        description="at most 47 letters, digits, '.', '_' and '-', of which the first is a letter "
        "or a digit"
    ),
]
_ARGUMENT_TYPES: Mapping[str, Any] = {
    "env_name": Annotated[
        str, Field(description="a Gymnasium id, 'module:id' or a server's address")
    ],
    **dict.fromkeys(("actor", "critic"), Network),
    **dict.fromkeys(("max_episodes", "max_timesteps", "update_interval"), PositiveInt),
    **dict.fromkeys(("save_interval", "log_interval", "num_envs"), PositiveInt),
    "seed": NonNegativeInt,
    "name": _RunName | None,
    "resume": bool,
    "metrics": Annotated[
        InstanceOf[Mapping[str, Any]], Field(description="a mapping of metric sinks")
    ],
}


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """Arguments of one call of `train_agent`, whose docstring describes them."""

    env_name: str
    actor: nn.Module
    critic: nn.Module
    ppo_config: PPOConfig
    max_episodes: int
    max_timesteps: int
    update_interval: int
    save_interval: int
    save_path: Path
    callback: Callback | None
    log_interval: int
    device: str | None
    num_envs: int
    seed: int
    name: str | None = None
    resume: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError if an argument has the wrong type or is out of range."""
        for name, argument_type in _ARGUMENT_TYPES.items():
            check_value(name, argument_type, getattr(self, name))
        if not isinstance(self.ppo_config, PPOConfig):
            raise ConfigError(
                f"ppo_config = {self.ppo_config!r:.80} must be a {PPOConfig.__module__}.PPOConfig"
            )
        if self.callback is not None:
            check_function("callback", self.callback, _CALLBACK_PARAMETERS)

    @property
    def run_name(self) -> str:
        """Name of the run folder in `save_path`."""
        return self.name or make_run_name(self.env_name.rpartition(":")[2], "agent")


class EpisodeReturns(list[float]):
    """Returns of the episodes, in the order in which they ended."""

    @property
    def running(self) -> list[float]:
        """Gymformer's running average after each episode, which starts at 0."""
        averages = itertools.accumulate(self, update_running_average, initial=0.0)
        return list(averages)[1:]


def update_running_average(average: float, episode_return: float) -> float:
    """Return the running average after one more episode."""
    return average + _RUNNING_WEIGHT * (episode_return - average)
