"""An environment with one seat in a game of Uno; the server plays the other seats."""

from __future__ import annotations

import random
import secrets
from typing import Any

from ludus.env import Environment, ReturnRange, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import EpisodeStateError, ErrorCode, IllegalActionError

from ..cards import sort_cards
from ..models import UnoAction, UnoObservation, UnoState
from ..options import UnoOptions
from ..policies import OPPONENTS
from ..rules import UnoGame
from ..text import UnoRenderer

_PLAYER_SEAT = 0


class UnoEnvironment(Environment[UnoAction, UnoObservation, UnoState]):
    """Uno, played from seat 0, which has the first turn. The reward is 1 for a win, -1 for a loss.

    The seed determines the cards and the moves of random opponents. An opponent sees only what
    its seat may see.

    Args:
        options: The fields of `UnoOptions`.

    Raises:
        ConfigError: An option is invalid.
    """

    action_type = UnoAction
    observation_type = UnoObservation
    state_type = UnoState
    name = "uno_env"
    description = "Uno against opponents on the server"
    needs_network = False
    steps_on_event_loop = True
    is_game = True

    def __init__(self, **options: Any) -> None:
        self._options = UnoOptions.parse(options)
        self._opponent = OPPONENTS[self._options.opponent]
        self._game: UnoGame | None = None
        self._opponent_rng = random.Random(0)
        self._events: list[str] = []
        self._state = self._make_state(None)
        self.text_renderer = UnoRenderer(self._options.text_style)

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        return self._options.to_json()

    @property
    def state(self) -> UnoState:
        """The state of the current episode."""
        return self._state

    @property
    def return_range(self) -> ReturnRange:
        """The returns of a lost and a won game."""
        return ReturnRange(-1.0, 1.0)

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[UnoObservation]:
        """Deal the cards and return the player's first observation."""
        seed = secrets.randbits(63) if seed is None else seed
        # The texts separate these numbers from those of a player with random.Random(seed).
        cards_rng = random.Random(f"uno_env cards {seed}")
        self._game = UnoGame(self._options.num_players, cards_rng)
        self._opponent_rng = random.Random(f"uno_env opponents {seed}")
        self._events = []
        self._state = self._make_state(episode_id)
        return Transition(self._observe(self._game, _PLAYER_SEAT))

    def step(self, action: UnoAction) -> Transition[UnoObservation]:
        """Make the move, let the others move, and return the player's next observation.

        Raises:
            IllegalActionError: The move is not legal.
            EpisodeStateError: There is no episode, or it is over.
        """
        game = self._game
        if game is None:
            raise EpisodeStateError(
                "a move needs a running episode; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        legal_moves = game.list_legal_moves()
        if action.move not in legal_moves:
            raise IllegalActionError(
                f"expected one of {', '.join(legal_moves)}; got {action.move[:80]!r}; the game is"
                " unchanged"
            )
        self._events = [f"player {_PLAYER_SEAT} {game.make_move(action.move)}"]
        self._play_opponents(game)
        self._state.step_count += 1
        self._state.winner = game.winner
        is_truncated = game.winner is None and self._state.step_count >= self._options.max_turns
        observation = self._observe(game, _PLAYER_SEAT)
        if game.winner is None and not is_truncated:
            return Transition(observation, 0.0)
        self._game = None
        observation.legal_actions = []
        has_won = game.winner == _PLAYER_SEAT
        reward = 0.0 if is_truncated else 1.0 if has_won else -1.0
        return Transition(
            observation,
            reward,
            terminated=not is_truncated,
            truncated=is_truncated,
            success=has_won,
        )

    def _play_opponents(self, game: UnoGame) -> None:
        while game.winner is None and game.current_seat != _PLAYER_SEAT:
            seat = game.current_seat
            move = self._opponent(self._observe(game, seat), self._opponent_rng)
            self._events.append(f"player {seat} {game.make_move(move)}")

    def _observe(self, game: UnoGame, seat: int) -> UnoObservation:
        """Return the observation of a seat. Only the player's seat gets the events."""
        num_players = self._options.num_players
        other_seats = [(seat + offset) % num_players for offset in range(1, num_players)]
        has_turn = game.current_seat == seat
        return UnoObservation(
            hand=sort_cards(game.hands[seat]),
            top=game.top,
            colour=game.color,
            others=[len(game.hands[other_seat]) for other_seat in other_seats],
            legal_actions=game.list_legal_moves() if has_turn else [],
            has_drawn=has_turn and game.drawn_card is not None,
            events=list(self._events) if seat == _PLAYER_SEAT else [],
        )

    def _make_state(self, episode_id: str | None) -> UnoState:
        return UnoState(
            episode_id=episode_id,
            num_players=self._options.num_players,
            opponent=self._options.opponent,
        )
