"""OpenEnv's own server with a counting environment; runs in the stock virtual environment.

Argument: the port.
"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class CountAction(Action):
    add: int


class CountObservation(Observation):
    total: int


class StockCountingEnv(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._total = 0

    def reset(self, seed=None, episode_id=None, **options):
        self._total = seed or 0
        return CountObservation(total=self._total, done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        self._total += action.add
        return CountObservation(total=self._total, reward=action.add, done=action.add == 7)

    @property
    def state(self):
        return State(episode_id="E", step_count=self._total)


app = create_app(
    StockCountingEnv, CountAction, CountObservation, env_name="stock", max_concurrent_envs=2
)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
