"""The view of one seat on a game's state, without hidden information."""

from __future__ import annotations

from typing import Any

import pyspiel

from ludus.env import Transition

from .games import LoadedGame
from .models import GamePhase, OpenSpielObservation
from .snapshots import SnapshotTransition

_MAX_DRAW_RETURN = 1e-9
"""Maximum absolute return of a draw."""


class SeatView:
    """The observations of one seat. Players and renderers see nothing else of the game."""

    __slots__ = (
        "_adds_text",
        "_encoder",
        "_loaded_game",
        "_reads_information_tensor",
        "_reads_tensor",
        "player",
    )

    def __init__(self, loaded_game: LoadedGame, player: int, *, adds_text: bool = False) -> None:
        self.player = player
        self._loaded_game = loaded_game
        self._adds_text = adds_text
        self._encoder = None if adds_text else loaded_game.snapshot_encoder
        game_type = loaded_game.game.get_type()
        self._reads_information_tensor = game_type.provides_information_state_tensor
        self._reads_tensor = game_type.provides_observation_tensor or self._reads_information_tensor

    def observe(
        self,
        state: pyspiel.State,
        phase: GamePhase = "playing",
        opponent_last_action: int | None = None,
    ) -> OpenSpielObservation:
        """Return the seat's observation. With `adds_text`, its metadata has OpenSpiel's strings."""
        return OpenSpielObservation.from_fields(
            {
                "metadata": self._make_text(state) if self._adds_text else {},
                "info_state": self._read_tensor(state),
                **self._make_other_fields(state, phase, opponent_last_action),
            }
        )

    def make_transition(
        self,
        state: pyspiel.State,
        phase: GamePhase,
        opponent_last_action: int | None,
        reward: float | None = None,
    ) -> Transition[OpenSpielObservation]:
        """Return the transition to this state, after a move of the seat or a deal."""
        is_terminated = phase == "terminal"
        success = self._has_won(state) if is_terminated else None
        encoder = self._encoder
        if encoder is None:
            observation = self.observe(state, phase, opponent_last_action)
            return Transition(observation, reward, is_terminated, success=success)
        other_fields = self._make_other_fields(state, phase, opponent_last_action)
        snapshot = encoder.take_snapshot(state, self.player)
        return SnapshotTransition(encoder, snapshot, other_fields, reward, is_terminated, success)

    def _has_won(self, state: pyspiel.State) -> bool | None:
        """Return whether the player won the finished game; None if the game has no winners."""
        if not self._loaded_game.can_be_won_and_lost:
            return None
        return bool(state.player_return(self.player) > _MAX_DRAW_RETURN)

    def _make_other_fields(
        self, state: pyspiel.State, phase: GamePhase, opponent_last_action: int | None
    ) -> dict[str, Any]:
        """Return the fields after `info_state`, in order."""
        return {
            "legal_actions": [] if phase == "terminal" else state.legal_actions(self.player),
            "game_phase": phase,
            "current_player_id": state.current_player(),
            "opponent_last_action": opponent_last_action,
        }

    def _read_tensor(self, state: pyspiel.State) -> list[float]:
        if not self._reads_tensor:
            return []
        if self._reads_information_tensor:
            return state.information_state_tensor(self.player)
        return state.observation_tensor(self.player)

    def _make_text(self, state: pyspiel.State) -> dict[str, object]:
        actions = [] if state.is_terminal() else state.legal_actions(self.player)
        names = [
            " ".join(state.action_to_string(self.player, action).split()) for action in actions
        ]
        if len(set(names)) < len(names):  # OpenSpiel gives two moves the same name
            names = [f"{name} #{action}" for name, action in zip(names, actions, strict=True)]
        text: dict[str, object] = {
            "view": self._read_string(state).strip("\n"),
            "answers": names,
        }
        if self._loaded_game.shows_moves and self._loaded_game.num_players > 1:
            text["last_moves"] = self._list_last_moves(state)
        return text

    def _list_last_moves(self, state: pyspiel.State) -> list[list[int | str]]:
        """Return the players and names of the moves since the seat's own move."""
        moves = state.full_history()
        start = len(moves)
        while start and moves[start - 1].player != self.player:
            start -= 1
        # The name of a move can depend on the state before it.
        replay = state.get_game().new_initial_state()
        names: list[list[int | str]] = []
        for index, move in enumerate(moves):
            if index >= start and move.player >= 0:
                name = replay.action_to_string(move.player, move.action)
                names.append([move.player, " ".join(name.split())])
            replay.apply_action(move.action)
        return names

    def _read_string(self, state: pyspiel.State) -> str:
        # The observation shows everything in games with perfect information. In other games, only
        # the information state includes earlier observations.
        game_type = self._loaded_game.game.get_type()
        has_history = game_type.provides_information_state_string
        if game_type.provides_observation_string and (
            self._loaded_game.has_perfect_information or not has_history
        ):
            return state.observation_string(self.player)
        return state.information_state_string(self.player) if has_history else ""
