"""OpenSpiel game for OpenEnv's servers, without imports from Ludus.

The client has one seat. Chance events and opponents are uniformly random, drawn from one generator
per episode.
"""

import random

import pyspiel


class Game:
    """A game with one seat for the client. Resets without a seed use increasing seeds."""

    def __init__(self, name: str, first_seed: int = 0) -> None:
        self._game = pyspiel.load_game(name)
        self._has_information_state = self._game.get_type().provides_information_state_tensor
        self._next_seed = first_seed
        self._state = None
        self._return = 0.0
        self.num_steps = 0

    def reset(self, seed: int | None = None) -> None:
        """Start an episode, and play up to the client's first action."""
        if seed is None:
            seed, self._next_seed = self._next_seed, self._next_seed + 1
        self._random = random.Random(seed)
        self._state = self._game.new_initial_state()
        self._return = 0.0
        self.num_steps = 0
        self._play_opponents()

    def step(self, action_id: int) -> float:
        """Play an action and the opponents' actions; return the reward."""
        self._state.apply_action(action_id)
        self._play_opponents()
        self.num_steps += 1
        previous_return, self._return = self._return, self._state.player_return(0)
        return self._return - previous_return

    @property
    def is_over(self) -> bool:
        return self._state.is_terminal()

    def observe(self) -> dict:
        """Return the fields of OpenEnv's OpenSpiel observation."""
        is_over, state = self.is_over, self._state
        return {
            "info_state": state.information_state_tensor(0)
            if self._has_information_state
            else state.observation_tensor(0),
            "legal_actions": [] if is_over else state.legal_actions(0),
            "game_phase": "terminal" if is_over else "playing",
            "current_player_id": state.current_player(),
            "opponent_last_action": None,
        }

    def _play_opponents(self) -> None:
        state = self._state
        while not state.is_terminal() and state.current_player() != 0:
            action_ids = state.legal_actions()
            state.apply_action(action_ids[int(self._random.random() * len(action_ids))])
