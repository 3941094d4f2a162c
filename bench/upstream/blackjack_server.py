"""OpenEnv's server with OpenSpiel's blackjack, the baseline of `bench/environments.py`.

Runs in a virtual environment with `openenv` and `open_spiel`. The environment is as fast as OpenEnv
allows, so that the comparison is of servers: it steps on the event loop, draws cards by index and
does not validate its observations.
Argument: the port.
"""

import random
import sys

import pyspiel
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

GAME = pyspiel.load_game("blackjack")
MAX_SESSIONS = 4096


class BlackjackAction(Action):
    """One move of the player."""

    action_id: int
    game_name: str = "blackjack"
    game_params: dict = Field(default_factory=dict)


class BlackjackObservation(Observation):
    """An observation with the fields of openspiel_env's."""

    info_state: list[float]
    legal_actions: list[int]
    game_phase: str = "playing"
    current_player_id: int = 0
    opponent_last_action: int | None = None


class BlackjackEnvironment(Environment):
    """Blackjack for one player, with cards from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._draw = random.Random()
        self._state = None
        self._num_steps = 0

    def reset(self, seed=None, episode_id=None, **options):
        """Deal a new game and return its first observation."""
        self._draw.seed(seed)
        self._num_steps = 0
        self._state = GAME.new_initial_state()
        self._deal()
        return self._observe("initial", None)

    def step(self, action, timeout_s=None, **options):
        """Apply a move and return the observation."""
        state = self._state
        if action.action_id not in state.legal_actions():
            raise ValueError(f"expected one of {state.legal_actions()}, got {action.action_id}")
        state.apply_action(action.action_id)
        self._num_steps += 1
        self._deal()
        if state.is_terminal():
            return self._observe("terminal", state.player_return(0))
        return self._observe("playing", 0.0)

    async def reset_async(self, seed=None, episode_id=None, **options):
        """Call `reset` on the event loop; OpenEnv runs synchronous methods in a thread."""
        return self.reset(seed)

    async def step_async(self, action, timeout_s=None, **options):
        """Call `step` on the event loop."""
        return self.step(action)

    @property
    def state(self):
        """State of the episode."""
        return State(episode_id=None, step_count=self._num_steps)

    def _deal(self):
        state, draw = self._state, self._draw
        while state.is_chance_node():
            cards = state.legal_actions()
            state.apply_action(cards[int(draw.random() * len(cards))])

    def _observe(self, phase, reward):
        state = self._state
        return BlackjackObservation.model_construct(
            info_state=state.observation_tensor(0),
            legal_actions=[] if phase == "terminal" else state.legal_actions(0),
            game_phase=phase,
            current_player_id=state.current_player(),
            done=phase == "terminal",
            reward=reward,
        )


app = create_app(
    BlackjackEnvironment,
    BlackjackAction,
    BlackjackObservation,
    env_name="blackjack",
    max_concurrent_envs=MAX_SESSIONS,
)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
