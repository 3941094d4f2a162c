"""What one seat may know of a game's state, and nothing else."""

from __future__ import annotations

from typing import Any

import pyspiel

from ludus.env import Transition

from .games import LoadedGame
from .models import GamePhase, OpenSpielObservation
from .snapshots import SnapshotTransition

_EVEN = 1e-9
"""A return that is no farther from 0 is a draw's."""


class SeatView:
    """A seat's narrow window on states of one game: players and text renderers see only this."""

    __slots__ = (
        "_adds_text",
        "_loaded",
        "_reads_information_tensor",
        "_reads_tensor",
        "_snapshots",
        "player",
    )

    def __init__(self, loaded: LoadedGame, player: int, *, adds_text: bool = False) -> None:
        self.player = player
        self._loaded = loaded
        self._adds_text = adds_text
        self._snapshots = None if adds_text else loaded.snapshots
        kind = loaded.game.get_type()
        self._reads_information_tensor = kind.provides_information_state_tensor
        self._reads_tensor = kind.provides_observation_tensor or self._reads_information_tensor

    def observe(
        self,
        state: pyspiel.State,
        phase: GamePhase = "playing",
        opponent_last_action: int | None = None,
    ) -> OpenSpielObservation:
        """The observation of the seat's player; with `adds_text`, its text in the metadata."""
        return OpenSpielObservation.of_fields(
            {
                "metadata": self._text(state) if self._adds_text else {},
                "info_state": self._tensor(state),
                **self._rest(state, phase, opponent_last_action),
            }
        )

    def transition(
        self,
        state: pyspiel.State,
        phase: GamePhase,
        opponent_last_action: int | None,
        reward: float | None = None,
    ) -> Transition[OpenSpielObservation]:
        """What a move of the seat's player, or a deal, has led to."""
        terminated = phase == "terminal"
        success = self._has_won(state) if terminated else None
        snapshots = self._snapshots
        if snapshots is None:
            observation = self.observe(state, phase, opponent_last_action)
            return Transition(observation, reward, terminated, success=success)
        rest = self._rest(state, phase, opponent_last_action)
        snapshot = snapshots.take(state, self.player)
        return SnapshotTransition(snapshots, snapshot, rest, reward, terminated, success)

    def _has_won(self, state: pyspiel.State) -> bool | None:
        """Whether the game that is over was won; None where it is none of winning and losing."""
        if not self._loaded.can_be_won_and_lost:
            return None
        return bool(state.player_return(self.player) > _EVEN)

    def _rest(
        self, state: pyspiel.State, phase: GamePhase, opponent_last_action: int | None
    ) -> dict[str, Any]:
        """The fields after `info_state`, in their order."""
        return {
            "legal_actions": [] if phase == "terminal" else state.legal_actions(self.player),
            "game_phase": phase,
            "current_player_id": state.current_player(),
            "opponent_last_action": opponent_last_action,
        }

    def _tensor(self, state: pyspiel.State) -> list[float]:
        if not self._reads_tensor:
            return []
        if self._reads_information_tensor:
            return state.information_state_tensor(self.player)
        return state.observation_tensor(self.player)

    def _text(self, state: pyspiel.State) -> dict[str, object]:
        actions = [] if state.is_terminal() else state.legal_actions(self.player)
        names = [" ".join(state.action_to_string(self.player, a).split()) for a in actions]
        if len(set(names)) < len(names):  # moves that OpenSpiel prints alike
            names = [f"{name} #{action}" for name, action in zip(names, actions, strict=True)]
        return {"view": self._string(state).strip("\n"), "answers": names}

    def _string(self, state: pyspiel.State) -> str:
        # A board shows everything in games of perfect information; in others only the
        # information state keeps what a player has seen before.
        kind = self._loaded.game.get_type()
        has_history = kind.provides_information_state_string
        if kind.provides_observation_string and (
            self._loaded.has_perfect_information or not has_history
        ):
            return state.observation_string(self.player)
        return state.information_state_string(self.player) if has_history else ""
