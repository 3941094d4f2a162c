"""One game of an Atari 2600, a decision every few frames."""

from __future__ import annotations

import random
import secrets
from typing import get_args

import numpy as np

from ludus.env import Environment, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    ConfigError,
    EpisodeStateError,
    ErrorCode,
    IllegalActionError,
    InvalidCallError,
)

from ..facts import Facts, facts_of
from ..models import (
    UNNAMED_GAME,
    UNNAMED_OBS_TYPE,
    AtariAction,
    AtariObservation,
    AtariState,
    ObsType,
)
from ..text import AtariRenderer, TextStyle
from .console import Console

OPPONENT_GAMES = frozenset({"boxing", "double_dunk", "ice_hockey", "pong", "tennis"})
"""Games whose points an opponent's are taken off: a score above 0 is a win."""


class AtariEnvironment(Environment[AtariAction, AtariObservation, AtariState]):
    """An Atari game; its points are the rewards.

    The seed draws how many frames pass before the first decision, and which actions are repeated
    where some are. Games against an opponent are won with a score above 0; of others nobody says.

    Args:
        game: a name that the Arcade Learning Environment knows, such as "space_invaders".
        obs_type: what `screen` shows: the memory, or the picture, coloured or grey.
        lists_pixels: sends pictures as lists of numbers, 100,800 for a coloured one, as OpenEnv's
            own server does; else as arrays.
        full_action_space: offers all 18 actions of the console.
        mode: one of the game's own; None is its first. `difficulty` likewise.
        repeat_action_probability: of each frame to go on with the action before.
        frameskip: frames that a decision holds.
        max_waiting_frames: at most so many pass before the first decision.
        max_turns: decisions after which the episode is cut off; 0 is never.
        max_scores: the episode ends once points were scored so many times, by either side; 0 is
            at the game's own end.
        text_style: "compact" shows the bare situation; "rules" explains game and answers.

    Raises:
        NotFoundError: there is no game of that name.
        ConfigError: ale-py is not installed, or the options do not fit.
    """

    action_type = AtariAction
    observation_type = AtariObservation
    state_type = AtariState
    name = "atari_env"
    description = "Atari 2600 games"

    def __init__(
        self,
        game: str = UNNAMED_GAME,
        *,
        obs_type: ObsType = "ram",
        lists_pixels: bool = False,
        full_action_space: bool = False,
        mode: int | None = None,
        difficulty: int | None = None,
        repeat_action_probability: float = 0.0,
        frameskip: int = 4,
        max_waiting_frames: int = 30,
        max_turns: int = 0,
        max_scores: int = 0,
        text_style: TextStyle = "compact",
    ) -> None:
        _require_choice("obs_type", obs_type, get_args(ObsType))
        _require_choice("text_style", text_style, get_args(TextStyle))
        counts = {"max_waiting_frames": max_waiting_frames, "max_turns": max_turns}
        for name, value in {**counts, "max_scores": max_scores, "frameskip": frameskip}.items():
            _require_count(name, value, 1 if name == "frameskip" else 0)
        if not 0 <= repeat_action_probability < 1:
            raise ConfigError(
                "expected repeat_action_probability from 0 to below 1, got"
                f" {repeat_action_probability!r}"
            )
        self._console = Console(
            game,
            has_all_actions=full_action_space,
            repeat_action_probability=repeat_action_probability,
            mode=mode,
            difficulty=difficulty,
        )
        self._options: JsonObject = {
            "game": game,
            "obs_type": obs_type,
            "lists_pixels": lists_pixels,
            "full_action_space": full_action_space,
            "mode": mode,
            "difficulty": difficulty,
            "repeat_action_probability": repeat_action_probability,
            "frameskip": frameskip,
            "max_waiting_frames": max_waiting_frames,
            "max_turns": max_turns,
            "max_scores": max_scores,
            "text_style": text_style,
        }
        self._game = game
        self._obs_type: ObsType = obs_type
        self._names = self._console.action_names
        self._is_playing = False
        self._state = self._new_state(None)
        self._num_scores = 0
        self._facts: Facts = {}
        self.text_renderer = AtariRenderer(game, text_style)

    @property
    def options(self) -> JsonObject:
        """What it was built with."""
        return dict(self._options)

    @property
    def state(self) -> AtariState:
        """Where the episode stands."""
        return self._state

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[AtariObservation]:
        """The first decision of a new game."""
        # A text of its own: players draw from random.Random(seed), too.
        rng = random.Random(f"atari_env {secrets.randbits(63) if seed is None else seed}")
        self._console.reset(rng, self._options["max_waiting_frames"])
        self._state = self._new_state(episode_id)
        self._num_scores = 0
        self._facts = {}
        self._is_playing = True
        return self._transition(None)

    def step(self, action: AtariAction) -> Transition[AtariObservation]:
        """What so many frames of the action led to.

        Raises:
            IllegalActionError: there is no action of that number.
            InvalidCallError: it is meant for another game, or another kind of server.
            EpisodeStateError: there is no episode, or it is over.
        """
        if not self._is_playing:
            raise EpisodeStateError(
                "expected a running episode, got a step before or after one; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        self._check_meant_for_this(action)
        if not 0 <= action.action_id < len(self._names):
            raise IllegalActionError(
                f"expected an action from 0 to {len(self._names) - 1}"
                f" ({', '.join(self._names)}), got {action.action_id}; the game stands"
            )
        points = self._console.press(action.action_id, self._options["frameskip"])
        self._state.step_count += 1
        self._state.episode_return += points
        self._num_scores += points != 0
        return self._transition(points)

    def close(self) -> None:
        """Leave the console to the next session."""
        self._is_playing = False
        self._console.close()

    def _transition(self, points: float | None) -> Transition[AtariObservation]:
        limit, scores = self._options["max_turns"], self._options["max_scores"]
        is_terminated = self._console.is_over or bool(scores and self._num_scores >= scores)
        is_truncated = bool(not is_terminated and limit and self._state.step_count >= limit)
        self._is_playing = not (is_terminated or is_truncated)
        success = None
        if not self._is_playing and self._game in OPPONENT_GAMES:
            success = self._state.episode_return > 0
        seen = self._console.seen(self._obs_type)
        is_listed = self._obs_type == "ram" or self._options["lists_pixels"]
        return Transition(
            self._observation(seen, is_listed),
            points,
            is_terminated,
            is_truncated,
            tensors={} if is_listed else {"screen": seen},
            success=success,
        )

    def _observation(self, seen: np.ndarray, is_listed: bool) -> AtariObservation:
        memory = self._console.memory
        self._facts = facts_of(self._game, memory, self._facts)
        num_frames = self._console.num_frames
        return AtariObservation(
            screen=seen.ravel().tolist() if is_listed else None,
            screen_shape=list(seen.shape),
            legal_actions=list(range(len(self._names))) if self._is_playing else [],
            action_names=self._names,
            score=self._state.episode_return,
            lives=self._console.lives,
            episode_frame_number=num_frames,
            frame_number=num_frames,
            memory=[] if self._obs_type == "ram" else memory.tolist(),
            facts=self._facts,
        )

    def _check_meant_for_this(self, action: AtariAction) -> None:
        meant = {
            "game_name": (action.game_name, UNNAMED_GAME, self._game),
            "obs_type": (action.obs_type, UNNAMED_OBS_TYPE, self._obs_type),
            "full_action_space": (
                *(action.full_action_space, False),
                self._options["full_action_space"],
            ),
        }
        for field, (value, unnamed, served) in meant.items():
            if value not in (unnamed, served):
                raise InvalidCallError(
                    f"expected an action for {field} {served!r}, which this session plays, got one"
                    f" for {value!r}; start a server for that or leave {field} out"
                )

    def _new_state(self, episode_id: str | None) -> AtariState:
        shared = AtariState.model_fields.keys() & self._options.keys()
        return AtariState(
            episode_id=episode_id,
            game_name=self._options["game"],
            **{name: self._options[name] for name in shared},
        )


def _require_choice(name: str, value: object, offered: tuple[str, ...]) -> None:
    if value not in offered:
        raise ConfigError(f"expected {name} out of {', '.join(offered)}, got {value!r}")


def _require_count(name: str, value: object, lowest: int) -> None:
    if type(value) is not int or value < lowest:
        raise ConfigError(f"expected {name} as a whole number from {lowest}, got {value!r}")
