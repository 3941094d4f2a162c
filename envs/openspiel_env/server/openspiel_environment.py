"""An environment with one seat in an OpenSpiel game. It plays chance and the other seats."""

from __future__ import annotations

import random
import secrets
from typing import Any

import pyspiel

from ludus.env import Environment, ReturnRange, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    ConfigError,
    EpisodeStateError,
    ErrorCode,
    ExecutionError,
    IllegalActionError,
    InvalidCallError,
)

from ..chance import ChanceStream, draw_weighted
from ..games import is_slow, load_game
from ..models import UNNAMED_GAME, GamePhase, OpenSpielAction, OpenSpielObservation, OpenSpielState
from ..opponents import is_search, make_opponent
from ..options import OpenSpielOptions
from ..seat_view import SeatView
from ..text import make_renderer

_CHANCE = int(pyspiel.PlayerId.CHANCE)
_TERMINAL = int(pyspiel.PlayerId.TERMINAL)
_MAX_DEALS = 1000
_MAX_LISTED_ACTIONS = 20


class OpenSpielEnvironment(Environment[OpenSpielAction, OpenSpielObservation, OpenSpielState]):
    """Any sequential OpenSpiel game, played from one seat.

    An episode uses two random streams made from its seed, one for chance and one for the
    opponents. Therefore the same seed deals the same cards, whatever the players do. The reward is
    everything that the seat won or lost since its last move, including during other players'
    moves. A deal in which the seat has no move is dealt again. If players move simultaneously,
    they move in turns instead, and each move is hidden until all have moved.

    Args:
        options: The fields of `OpenSpielOptions`.

    Raises:
        NotFoundError: The game does not exist.
        ConfigError: An option is invalid or does not fit the game.
    """

    action_type = OpenSpielAction
    observation_type = OpenSpielObservation
    state_type = OpenSpielState
    name = "openspiel_env"
    description = "Any sequential OpenSpiel game, played from one seat"
    steps_on_event_loop = True
    is_game = True

    _chance: ChanceStream
    _opponent_rng: random.Random

    def __init__(self, **options: Any) -> None:
        settings = OpenSpielOptions.parse(options)
        self._game = load_game(settings.game, settings.game_params)
        if settings.agent_player >= self._game.num_players:
            raise ConfigError(
                f"agent_player must be at most {self._game.num_players - 1}, the last seat of "
                f"{settings.game!r}, got {settings.agent_player}; set agent_player to a seat"
            )
        self._agent_seat = settings.agent_player
        opponent = settings.opponent
        self._opponent = make_opponent(opponent, self._game)
        self._opponent_name = (
            opponent
            if isinstance(opponent, str)
            else getattr(opponent, "__name__", type(opponent).__name__)
        )
        self._text_style = settings.text_style
        self.text_renderer = make_renderer(self._game, self._agent_seat, settings.text_style)
        self._seat_view = SeatView(
            self._game, self._agent_seat, adds_text=self.text_renderer.needs_text
        )
        self._state: pyspiel.State | None = None
        self._episode_id: str | None = None
        self._num_steps = 0
        self._total_return = 0.0
        self._opponent_last_action: int | None = None

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        options: JsonObject = {
            "game": self._game.name,
            "game_params": self._game.params,
            "agent_player": self._agent_seat,
            "text_style": self._text_style,
        }
        if self._game.num_players > 1:
            options["opponent"] = self._opponent_name
        if self._game.is_turn_based:
            options["sequential_form"] = "turn_based_simultaneous_game"
        return options

    @property
    def return_range(self) -> ReturnRange | None:
        """The lowest and the highest utility; None for games that reward single moves.

        The bounds of such games are far from the returns of actual episodes.
        """
        return self._game.return_range

    @property
    def state(self) -> OpenSpielState:
        """The state of the current episode. `step_count` is the number of the agent's moves."""
        if self._episode_id is None and self._state is not None:
            self._episode_id = secrets.token_hex(16)
        return OpenSpielState(
            episode_id=self._episode_id,
            step_count=self._num_steps,
            game_name=self._game.name,
            agent_player=self._agent_seat,
            opponent_policy=self._opponent_name,
            game_params=self._game.params,
            num_players=self._game.num_players,
        )

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[OpenSpielObservation]:
        """Deal, and return the agent's first observation.

        Raises:
            ExecutionError: The agent's seat never has a move.
        """
        if seed is None:
            seed = secrets.randbits(63)
        self._chance = ChanceStream(seed)
        if self._game.num_players > 1:
            self._opponent_rng = random.Random(f"opponents of {seed}")
        self._episode_id = episode_id  # None: `state` creates one when needed
        self._num_steps = 0
        self._total_return = 0.0
        for _ in range(_MAX_DEALS):
            state = self._deal()
            if self._play_other_seats(state) == self._agent_seat:
                self._state = state
                return self._seat_view.make_transition(state, "initial", self._opponent_last_action)
        raise ExecutionError(
            f"seat {self._agent_seat} of {self._game.name!r} had no move in {_MAX_DEALS} deals; "
            "choose another agent_player"
        )

    def step(self, action: OpenSpielAction) -> Transition[OpenSpielObservation]:
        """Make the agent's move, let the others move, and return the agent's next observation.

        Raises:
            IllegalActionError: The move is not legal.
            InvalidCallError: The move is for another game.
            EpisodeStateError: There is no episode, or it is over.
        """
        state = self._require_running_state()
        if action.game_name != UNNAMED_GAME or action.game_params:
            self._check_recipient(action)
        if action.action_id not in state.legal_actions():
            raise self._make_illegal_move_error(state, action.action_id)
        self._state = None  # if an opponent fails, the episode is over
        state.apply_action(action.action_id)
        phase: GamePhase = "terminal" if self._play_other_seats(state) == _TERMINAL else "playing"
        self._state = state
        self._num_steps += 1
        old_return, self._total_return = self._total_return, state.player_return(self._agent_seat)
        reward = self._total_return - old_return
        return self._seat_view.make_transition(state, phase, self._opponent_last_action, reward)

    def _deal(self) -> pyspiel.State:
        self._state = None
        self._opponent_last_action = None
        game = self._game.game
        if self._game.has_random_seed:
            game = self._game.with_seed(int(self._chance.random() * 2**31))
        return game.new_initial_state()

    def _play_other_seats(self, state: pyspiel.State) -> int:
        """Play until the agent moves or the game is over; return the current player."""
        seat, chance, is_uniform = self._agent_seat, self._chance, self._game.has_uniform_chance
        current_player, apply_action = state.current_player, state.apply_action
        while True:
            player = current_player()
            if player == _CHANCE:
                if is_uniform:
                    apply_action(chance.pick_event(state.legal_actions()))
                else:
                    apply_action(draw_weighted(state, chance))
            elif player in (seat, _TERMINAL):
                return player
            else:
                action_id = self._opponent(state, self._opponent_rng)
                state.apply_action(action_id)
                if self._game.shows_moves:
                    self._opponent_last_action = action_id

    def _require_running_state(self) -> pyspiel.State:
        if self._state is None:
            raise EpisodeStateError(
                "a step needs a running episode; call reset", ErrorCode.NOT_RESET
            )
        if self._state.is_terminal():
            raise EpisodeStateError(
                f"the episode is over after {self._num_steps} steps; call reset to start another "
                "episode",
                ErrorCode.EPISODE_OVER,
            )
        return self._state

    def _check_recipient(self, action: OpenSpielAction) -> None:
        if action.game_name not in (UNNAMED_GAME, self._game.name, self._game.short_name):
            raise InvalidCallError(
                f"this session plays {self._game.name!r}, but the move is for "
                f"{action.game_name!r}; start a server for that game or leave game_name out"
            )
        if action.game_params and action.game_params != self._game.params:
            raise InvalidCallError(
                f"this session has game_params {self._game.params}, but the move is for "
                f"{action.game_params}; start a server with those or leave game_params out"
            )

    def _make_illegal_move_error(self, state: pyspiel.State, action_id: int) -> IllegalActionError:
        legal_actions = state.legal_actions()
        choices = [
            f"{action} ({state.action_to_string(self._agent_seat, action)})"
            for action in legal_actions[:_MAX_LISTED_ACTIONS]
        ]
        if len(legal_actions) > _MAX_LISTED_ACTIONS:
            choices.append(f"... {len(legal_actions)} in total")
        return IllegalActionError(
            f"expected a legal action, one of {', '.join(choices)}; got {action_id}; the game is "
            "unchanged"
        )


class ThreadedOpenSpielEnvironment(OpenSpielEnvironment):
    """An OpenSpiel game whose moves can take longer than about a millisecond."""

    steps_on_event_loop = False


def build_environment(**options: Any) -> OpenSpielEnvironment:
    """Return the environment for a game. Slow games and opponents run off the event loop."""
    settings = OpenSpielOptions.parse(options)
    is_threaded = is_slow(settings.game) or is_search(settings.opponent)
    environment_type = ThreadedOpenSpielEnvironment if is_threaded else OpenSpielEnvironment
    return environment_type(**options)
