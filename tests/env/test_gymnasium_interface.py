"""Environments that do not have Gymnasium's interface are reported in one sentence."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ludus.env.targets.targets import environment_factory
from ludus.proto.errors import ExecutionError
from ludus.trainer.classic.environments import GymnasiumEnvironments


class OldEnv(gymnasium.Env[Any, Any]):
    """An environment with one fault."""

    observation_space = spaces.Box(0, 9, (1,), dtype=np.int64)
    action_space = spaces.Discrete(2)
    fault = ""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def reset(self, **arguments: Any) -> Any:
        if self.fault == "no options" and "options" in arguments:
            raise TypeError("OldEnv.reset() got an unexpected keyword argument 'options'")
        observation = np.array([0.5] if self.fault == "float observation" else [1])
        return observation if self.fault == "bare observation" else (observation, {})

    def step(self, action: int) -> Any:
        if self.fault == "four values":
            return np.array([1]), 0.0, False, {}
        return np.array([1]), None if self.fault == "no reward" else 1.0, False, False, {}


gymnasium.register("ludus-tests/Old-v0", OldEnv)
gymnasium.register("ludus-tests/OldLimited-v0", OldEnv, max_episode_steps=5)

FAULTS = [
    ("no options", "OldEnv: reset must accept seed and options"),
    ("bare observation", r"OldEnv: reset must return \(observation, info\)"),
    ("four values", r"OldEnv: step must return \(observation, reward, terminated"),
    ("no reward", "the reward of step must be a number, got None"),
]


@pytest.mark.parametrize("env_id", ["ludus-tests/Old-v0", "ludus-tests/OldLimited-v0"])
@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_old_interface_is_one_sentence(env_id: str, fault: str, message: str) -> None:
    environment = environment_factory(f"gymnasium:{env_id}", {"fault": fault})()
    with pytest.raises(ExecutionError, match=message):
        environment.reset(seed=1)
        environment.step(environment.action_type(action=1))  # type: ignore[call-arg]
    parallel_environments = GymnasiumEnvironments(env_id, 2, {"fault": fault})
    with pytest.raises(ExecutionError, match=message):
        parallel_environments.reset({0: 1, 1: 2})
        parallel_environments.step(np.array([1, 1]))


def test_observation_outside_its_space_is_one_sentence() -> None:
    factory = environment_factory("gymnasium:ludus-tests/Old-v0", {"fault": "float observation"})
    with pytest.raises(ExecutionError, match=r"observation is not in Box\(0, 9.*fractional part"):
        factory().reset(seed=1)
