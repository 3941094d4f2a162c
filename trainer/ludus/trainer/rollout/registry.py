"""The registry of episode runners.

    settings of an environment              runner
    none                                    TurnLoopRunner      policy and environment take turns
    rollout = "module:function"             FunctionRunner      a function plays one episode
    rollout = "module:Class"                the class itself, a runner
    rollout = "NAME:module:function"        the runner class that entry point NAME registers
    agent = {...}                           AgentRunner         an agent plays one episode

An installed package registers a runner class under a name with an entry point of group
`ludus.episode_runners`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import import_object
from ludus.trainer.rollout.agents.runner import AgentRunner
from ludus.trainer.rollout.runner import EpisodeRunner, RunnerParts
from ludus.trainer.rollout.turns import FunctionRunner, TurnLoopRunner

ENTRY_POINTS = "ludus.episode_runners"


async def start_runner(parts: RunnerParts) -> EpisodeRunner:
    """Return the runner that plays the episodes of one environment.

    Raises:
        ConfigError: the environment's rollout function, runner or agent cannot be used.
    """
    config = parts.config
    runner_class: Any = TurnLoopRunner
    if config.agent is not None:
        runner_class = AgentRunner
    elif config.rollout_runner is not None:
        runner_class = find_registered_runner(config.rollout_runner)
    elif config.rollout_function is not None:
        function = import_object(config.rollout_function, "environment.rollout")
        runner_class = function if isinstance(function, type) else FunctionRunner
    runner: EpisodeRunner = await runner_class.start(parts)
    return runner


def find_registered_runner(name: str) -> Any:
    """Return the runner class that an installed package registers under `name`.

    Raises:
        ConfigError: no installed package registers the name.
    """
    registered_runners = entry_points(group=ENTRY_POINTS)
    if name not in registered_runners.names:
        raise ConfigError(
            f"environment.rollout = '{name}:...' names a runner that is not registered; expected "
            f"one of {sorted(registered_runners.names)}. Install the package that registers "
            f"'{name}' as an "
            f"entry point of '{ENTRY_POINTS}'"
        )
    return registered_runners[name].load()
