"""Game on OpenEnv's 0.1.x server, which uses stateful HTTP and has one environment per process.

Arguments: game, port, first seed. Resets take no seed, so the server counts upwards.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from openenv_core.env_server import Action, Environment, Observation, State, create_app

sys.path.insert(0, str(Path(__file__).parent))
from game import Game


@dataclass
class GameAction(Action):
    action_id: int = 0


@dataclass
class GameObservation(Observation):
    info_state: list = field(default_factory=list)
    legal_actions: list = field(default_factory=list)
    game_phase: str = "playing"
    current_player_id: int = 0
    opponent_last_action: int | None = None


class GameEnvironment(Environment):
    def __init__(self, name: str, first_seed: int) -> None:
        super().__init__()
        self._game = Game(name, first_seed)

    def reset(self):
        self._game.reset()
        return GameObservation(done=False, reward=None, **self._game.observe())

    def step(self, action):
        reward = self._game.step(action.action_id)
        return GameObservation(done=self._game.is_over, reward=reward, **self._game.observe())

    @property
    def state(self):
        return State(episode_id="E", step_count=self._game.num_steps)


if __name__ == "__main__":
    environment = GameEnvironment(sys.argv[1], int(sys.argv[3]))
    app = create_app(environment, GameAction, GameObservation)
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
