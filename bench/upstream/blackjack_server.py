"""OpenEnv's own server with OpenSpiel's blackjack: what `bench/environments.py` compares with.

Runs in a virtual environment with `openenv` and `open_spiel`. Written as cheaply as OpenEnv
allows, so that the comparison is of servers: it steps on the event loop, cards are drawn by
index, and observations are built without validating what is right by construction.
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
    """The same fields as openspiel_env's."""

    info_state: list[float]
    legal_actions: list[int]
    game_phase: str = "playing"
    current_player_id: int = 0
    opponent_last_action: int | None = None


class BlackjackEnvironment(Environment):
    """One seat at blackjack; the cards follow from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._draw = random.Random()
        self._state = None
        self._num_steps = 0

    def reset(self, seed=None, episode_id=None, **options):
        """The first view of a new deal."""
        self._draw.seed(seed)
        self._num_steps = 0
        self._state = GAME.new_initial_state()
        self._deal()
        return self._observe("initial", None)

    def step(self, action, timeout_s=None, **options):
        """What the move led to."""
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
        """The same on the event loop: OpenEnv hands what is not async to a thread."""
        return self.reset(seed)

    async def step_async(self, action, timeout_s=None, **options):
        """The same on the event loop."""
        return self.step(action)

    @property
    def state(self):
        """Where the episode stands."""
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
