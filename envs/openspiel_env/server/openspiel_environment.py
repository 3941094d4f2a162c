"""One seat at an OpenSpiel game: chance and the other seats are played for it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from typing import Any

import pyspiel

from ludus.env import Environment, Transition
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
from ..opponents import make_opponent, searches
from ..policies import Policy
from ..seat_view import SeatView
from ..text import TextStyle, make_renderer

_CHANCE = int(pyspiel.PlayerId.CHANCE)
_TERMINAL = int(pyspiel.PlayerId.TERMINAL)
_MAX_DEALS = 1000
_MAX_LISTED_ACTIONS = 20


class OpenSpielEnvironment(Environment[OpenSpielAction, OpenSpielObservation, OpenSpielState]):
    """Any sequential OpenSpiel game, played from one seat.

    An episode draws from two streams made from its seed, one for chance and one for the
    opponents, so the same seed deals the same cards whatever the players do. A reward is all
    that the seat won or lost since its last move, also while others moved. A deal in which
    the seat never gets to move is dealt again.

    Args:
        game: a name that `pyspiel.load_game` knows. Games whose players move at once are
            played turn by turn, each move hidden until all have moved.
        game_params: parameters of the game, for example {"players": 3}.
        agent_player: the seat to play from.
        opponent: who plays the other seats: random, first, last or middle (of the legal
            moves), mcts or mcts(500), tree search with so many simulations a move, the name of
            one of the game's fixed policies, or a policy.
        text_style: "compact" shows the bare situation; "rules" explains game and answers.

    Raises:
        NotFoundError: there is no game of that name.
        ConfigError: game, parameters, seat, opponent or style do not fit.
    """

    action_type = OpenSpielAction
    observation_type = OpenSpielObservation
    state_type = OpenSpielState
    name = "openspiel_env"
    description = "Any sequential OpenSpiel game, played from one seat"
    steps_on_event_loop = True

    _chance: ChanceStream
    _opponent_rng: random.Random

    def __init__(
        self,
        game: str = "catch",
        *,
        game_params: Mapping[str, Any] | None = None,
        agent_player: int = 0,
        opponent: str | Policy = "random",
        text_style: TextStyle = "compact",
    ) -> None:
        self._loaded = load_game(game, game_params)
        if not 0 <= agent_player < self._loaded.num_players:
            raise ConfigError(
                f"expected agent_player between 0 and {self._loaded.num_players - 1}, the seats "
                f"of {game!r}, got {agent_player}; set agent_player to one of them"
            )
        self._agent = agent_player
        self._opponent = make_opponent(opponent, self._loaded)
        self._opponent_name = (
            opponent
            if isinstance(opponent, str)
            else getattr(opponent, "__name__", type(opponent).__name__)
        )
        self._text_style = text_style
        self.text_renderer = make_renderer(self._loaded, agent_player, text_style)
        self._view = SeatView(self._loaded, agent_player, adds_text=self.text_renderer.needs_text)
        self._state: pyspiel.State | None = None
        self._episode_id: str | None = None
        self._num_steps = 0
        self._return = 0.0
        self._opponent_last_action: int | None = None

    @property
    def options(self) -> JsonObject:
        """What this environment was built with."""
        options: JsonObject = {
            "game": self._loaded.name,
            "game_params": self._loaded.params,
            "agent_player": self._agent,
            "text_style": self._text_style,
        }
        if self._loaded.num_players > 1:
            options["opponent"] = self._opponent_name
        if self._loaded.is_turn_based:
            options["sequential_form"] = "turn_based_simultaneous_game"
        return options

    @property
    def state(self) -> OpenSpielState:
        """Where the episode stands; `step_count` counts the agent's moves."""
        if self._episode_id is None and self._state is not None:
            self._episode_id = secrets.token_hex(16)
        return OpenSpielState(
            episode_id=self._episode_id,
            step_count=self._num_steps,
            game_name=self._loaded.name,
            agent_player=self._agent,
            opponent_policy=self._opponent_name,
            game_params=self._loaded.params,
            num_players=self._loaded.num_players,
        )

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[OpenSpielObservation]:
        """The agent's first view of a new deal.

        Raises:
            ExecutionError: the agent's seat does not get to move.
        """
        if seed is None:
            seed = secrets.randbits(63)
        self._chance = ChanceStream(seed)
        if self._loaded.num_players > 1:
            self._opponent_rng = random.Random(f"opponents of {seed}")
        self._episode_id = episode_id  # None: made up when somebody asks
        self._num_steps = 0
        self._return = 0.0
        for _ in range(_MAX_DEALS):
            state = self._deal()
            if self._play_others(state) == self._agent:
                self._state = state
                return self._view.transition(state, "initial", self._opponent_last_action)
        raise ExecutionError(
            f"expected a deal of {self._loaded.name!r} in which seat {self._agent} moves, got "
            f"none in {_MAX_DEALS}; choose another agent_player"
        )

    def step(self, action: OpenSpielAction) -> Transition[OpenSpielObservation]:
        """What the agent sees after its move and those of the others.

        Raises:
            IllegalActionError: the rules do not allow the move now.
            InvalidCallError: the move is meant for another game.
            EpisodeStateError: there is no episode, or it is over.
        """
        state = self._running_state()
        if action.game_name != UNNAMED_GAME or action.game_params:
            self._check_meant_for_this_game(action)
        if action.action_id not in state.legal_actions():
            raise self._illegal(state, action.action_id)
        self._state = None  # an opponent that fails leaves no half-played episode behind
        state.apply_action(action.action_id)
        phase: GamePhase = "terminal" if self._play_others(state) == _TERMINAL else "playing"
        self._state = state
        self._num_steps += 1
        return_before = self._return
        self._return = state.player_return(self._agent)
        reward = self._return - return_before
        return self._view.transition(state, phase, self._opponent_last_action, reward)

    def _deal(self) -> pyspiel.State:
        self._state = None
        self._opponent_last_action = None
        game = self._loaded.game
        if self._loaded.has_random_seed:
            game = self._loaded.reseeded(int(self._chance.random() * 2**31))
        return game.new_initial_state()

    def _play_others(self, state: pyspiel.State) -> int:
        """The agent's seat, or the end of the game, after chance and the others have moved."""
        agent, chance, is_uniform = self._agent, self._chance, self._loaded.has_uniform_chance
        current_player, apply_action = state.current_player, state.apply_action
        while True:
            player = current_player()
            if player == _CHANCE:
                if is_uniform:
                    apply_action(chance.pick(state.legal_actions()))
                else:
                    apply_action(draw_weighted(state, chance))
            elif player in (agent, _TERMINAL):
                return player
            else:
                action_id = self._opponent(state, self._opponent_rng)
                state.apply_action(action_id)
                if self._loaded.shows_moves:
                    self._opponent_last_action = action_id

    def _running_state(self) -> pyspiel.State:
        if self._state is None:
            raise EpisodeStateError(
                "expected a reset before the first step; call reset", ErrorCode.NOT_RESET
            )
        if self._state.is_terminal():
            raise EpisodeStateError(
                f"expected no step after the episode's end (it took {self._num_steps} steps); "
                "call reset to start the next one",
                ErrorCode.EPISODE_OVER,
            )
        return self._state

    def _check_meant_for_this_game(self, action: OpenSpielAction) -> None:
        if action.game_name not in (UNNAMED_GAME, self._loaded.name, self._loaded.short_name):
            raise InvalidCallError(
                f"expected a move for {self._loaded.name!r}, which this session plays, got one "
                f"for {action.game_name!r}; start a server for that game or leave game_name out"
            )
        if action.game_params and action.game_params != self._loaded.params:
            raise InvalidCallError(
                f"expected a move for {self._loaded.name!r} with game_params "
                f"{self._loaded.params}, got one for {action.game_params}; start a server with "
                "those or leave game_params out"
            )

    def _illegal(self, state: pyspiel.State, action_id: int) -> IllegalActionError:
        legal_actions = state.legal_actions()
        named = [
            f"{action} ({state.action_to_string(self._agent, action)})"
            for action in legal_actions[:_MAX_LISTED_ACTIONS]
        ]
        if len(legal_actions) > _MAX_LISTED_ACTIONS:
            named.append(f"... {len(legal_actions)} in all")
        return IllegalActionError(
            f"expected a legal action, one of {', '.join(named)}; got {action_id}; the game "
            "stands where it was"
        )


class ThreadedOpenSpielEnvironment(OpenSpielEnvironment):
    """The same for games whose moves can take longer than about a millisecond."""

    steps_on_event_loop = False


def build_environment(game: str = "catch", **options: Any) -> OpenSpielEnvironment:
    """The environment for a game, off the event loop where a move can take long."""
    thinks = is_slow(game) or searches(options.get("opponent", ""))
    kind = ThreadedOpenSpielEnvironment if thinks else OpenSpielEnvironment
    return kind(game, **options)
