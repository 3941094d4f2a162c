"""A seat at Uno, against players of the server."""

from __future__ import annotations

import random
import secrets
from typing import get_args

from ludus.env import Environment, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, EpisodeStateError, ErrorCode, IllegalActionError

from ..cards import in_order
from ..models import UnoAction, UnoObservation, UnoState
from ..policies import POLICIES
from ..rules import Deal
from ..text import TextStyle, UnoRenderer

_ME = 0
_MAX_PLAYERS = 10
_MAX_TURNS = 1000


class UnoEnvironment(Environment[UnoAction, UnoObservation, UnoState]):
    """Uno, played from seat 0, which begins; 1 for a deal that is won and -1 for one that is lost.

    The seed shuffles, and draws what random opponents do. Opponents see what their seats see.

    Args:
        num_players: 2 to 10.
        opponent: who plays the other seats, "random" or "greedy".
        max_turns: moves of the player after which the deal is cut off, unpaid.
        text_style: "compact" shows the bare situation; "rules" explains.

    Raises:
        ConfigError: an option does not fit.
    """

    action_type = UnoAction
    observation_type = UnoObservation
    state_type = UnoState
    name = "uno_env"
    description = "Uno against players of the server"
    steps_on_event_loop = True

    def __init__(
        self,
        num_players: int = 2,
        *,
        opponent: str = "random",
        max_turns: int = 100,
        text_style: TextStyle = "compact",
    ) -> None:
        counts = {"num_players": (num_players, 2, _MAX_PLAYERS)}
        counts["max_turns"] = (max_turns, 1, _MAX_TURNS)
        for name, (value, lowest, highest) in counts.items():
            if type(value) is not int or not lowest <= value <= highest:
                raise ConfigError(f"expected {name} from {lowest} to {highest}, got {value!r}")
        choices = {"opponent": (opponent, tuple(POLICIES))}
        choices["text_style"] = (text_style, get_args(TextStyle))
        for name, (chosen, offered) in choices.items():
            if chosen not in offered:
                raise ConfigError(f"expected {name} out of {', '.join(offered)}, got {chosen!r}")
        self._num_players = num_players
        self._opponent = opponent
        self._max_turns = max_turns
        self._text_style = text_style
        self._deal: Deal | None = None
        self._rng = random.Random(0)
        self._events: list[str] = []
        self._state = UnoState(num_players=num_players, opponent=opponent)
        self.text_renderer = UnoRenderer(text_style)

    @property
    def options(self) -> JsonObject:
        """What it was built with."""
        return {
            "num_players": self._num_players,
            "opponent": self._opponent,
            "max_turns": self._max_turns,
            "text_style": self._text_style,
        }

    @property
    def state(self) -> UnoState:
        """Where the episode stands."""
        return self._state

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[UnoObservation]:
        """The player's first view of a new deal."""
        seed = secrets.randbits(63) if seed is None else seed
        # Texts of its own: players draw from random.Random(seed), too.
        self._deal = Deal(self._num_players, random.Random(f"uno_env cards {seed}"))
        self._rng = random.Random(f"uno_env opponents {seed}")
        self._events = []
        self._state = UnoState(
            episode_id=episode_id, num_players=self._num_players, opponent=self._opponent
        )
        return Transition(self._seen_by(self._deal, _ME))

    def step(self, action: UnoAction) -> Transition[UnoObservation]:
        """What the player sees at its next turn, or at the end.

        Raises:
            IllegalActionError: the move is not legal now.
            EpisodeStateError: there is no deal, or it is over.
        """
        deal = self._deal
        if deal is None:
            raise EpisodeStateError(
                "expected a running deal, got a move before or after one; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        legal = deal.legal_moves()
        if action.move not in legal:
            raise IllegalActionError(
                f"expected one of {', '.join(legal)}; got {action.move[:80]!r}; the deal stands"
            )
        self._events = [f"player 0 {deal.move(action.move)}"]
        while deal.winner is None and deal.turn != _ME:
            seat = deal.turn
            move = POLICIES[self._opponent](self._seen_by(deal, seat), self._rng)
            self._events.append(f"player {seat} {deal.move(move)}")
        self._state.step_count += 1
        self._state.winner = deal.winner
        is_cut_off = deal.winner is None and self._state.step_count >= self._max_turns
        shown = self._seen_by(deal, _ME)
        if deal.winner is None and not is_cut_off:
            return Transition(shown, 0.0)
        self._deal = None
        shown.legal_actions = []
        has_won = deal.winner == _ME
        reward = 0.0 if is_cut_off else 1.0 if has_won else -1.0
        return Transition(
            shown, reward, terminated=not is_cut_off, truncated=is_cut_off, success=has_won
        )

    def _seen_by(self, deal: Deal, seat: int) -> UnoObservation:
        """What a seat knows; only the player's own is told what happened."""
        others = [(seat + step) % self._num_players for step in range(1, self._num_players)]
        is_its_turn = deal.turn == seat
        return UnoObservation(
            hand=in_order(deal.hands[seat]),
            top=deal.top,
            colour=deal.colour,
            others=[len(deal.hands[other]) for other in others],
            legal_actions=deal.legal_moves() if is_its_turn else [],
            has_drawn=is_its_turn and deal.drawn is not None,
            events=list(self._events) if seat == _ME else [],
        )
