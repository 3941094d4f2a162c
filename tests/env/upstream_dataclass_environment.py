"""An OpenEnv 0.1 environment. Importing this module requires OpenEnv 0.1."""

from dataclasses import dataclass

from openenv_core.env_server import Action, Environment, Observation, State, create_fastapi_app


@dataclass(kw_only=True)
class SumAction(Action):
    add: int


@dataclass(kw_only=True)
class SumObservation(Observation):
    total: int


@dataclass
class SumState(State):
    total: int = 0


class SumEnvironment(Environment):
    """An environment that adds numbers until the total is ten or more."""

    def __init__(self):
        super().__init__()
        self._state = SumState()

    def reset(self) -> SumObservation:
        self._state = SumState(episode_id="E")
        return SumObservation(total=0)

    def step(self, action: SumAction) -> SumObservation:
        self._state.total += action.add
        self._state.step_count += 1
        return SumObservation(total=self._state.total, done=self._state.total >= 10, reward=1)

    @property
    def state(self) -> SumState:
        return self._state


app = create_fastapi_app(SumEnvironment(), SumAction, SumObservation)
