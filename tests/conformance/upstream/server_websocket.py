"""Game on an OpenEnv server of 0.2 or later, which has one session per WebSocket.

Arguments: game, port, first seed for resets without a seed, maximum number of sessions.
"""

import sys
from pathlib import Path

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

sys.path.insert(0, str(Path(__file__).parent))
from game import Game


class GameAction(Action):
    action_id: int


class GameObservation(Observation):
    info_state: list[float]
    legal_actions: list[int]
    game_phase: str = "playing"
    current_player_id: int = 0
    opponent_last_action: int | None = None


class GameEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._game = Game(sys.argv[1], int(sys.argv[3]))

    def reset(self, seed=None, episode_id=None):
        self._game.reset(seed)
        return GameObservation(done=False, reward=None, **self._game.observe())

    def step(self, action, timeout_s=None):
        reward = self._game.step(action.action_id)
        return GameObservation(done=self._game.is_over, reward=reward, **self._game.observe())

    @property
    def state(self):
        return State(episode_id="E", step_count=self._game.num_steps)


if __name__ == "__main__":
    app = create_app(
        GameEnvironment,
        GameAction,
        GameObservation,
        env_name="game",
        max_concurrent_envs=int(sys.argv[4]),
    )
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
