"""An environment with one Atari 2600 game and a decision every few frames."""

from __future__ import annotations

import random
import secrets
from typing import Any

import numpy as np

from ludus.env import Environment, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    EpisodeStateError,
    ErrorCode,
    IllegalActionError,
    InvalidCallError,
)

from ..facts import Facts, read_facts
from ..models import (
    UNNAMED_GAME,
    UNNAMED_OBS_TYPE,
    AtariAction,
    AtariObservation,
    AtariState,
)
from ..options import AtariOptions
from ..text import AtariRenderer
from .console import Console

OPPONENT_GAMES = frozenset({"boxing", "double_dunk", "ice_hockey", "pong", "tennis"})
"""Games against an opponent. Their score is the difference of points: above 0 is a win."""


class AtariEnvironment(Environment[AtariAction, AtariObservation, AtariState]):
    """An Atari game whose points are the rewards.

    The seed determines the number of frames before the first decision, and which frames repeat the
    previous action. A game against an opponent is a success if its score is above 0; other games
    do not report success.

    Args:
        options: The fields of `AtariOptions`.

    Raises:
        NotFoundError: The game does not exist.
        ConfigError: ale-py is not installed, or an option is invalid.
    """

    action_type = AtariAction
    observation_type = AtariObservation
    state_type = AtariState
    name = "atari_env"
    description = "Atari 2600 games"
    is_game = True

    def __init__(self, **options: Any) -> None:
        self._options = AtariOptions.parse(options)
        self._console = Console(
            self._options.game,
            has_all_actions=self._options.full_action_space,
            repeat_action_probability=self._options.repeat_action_probability,
            mode=self._options.mode,
            difficulty=self._options.difficulty,
        )
        self._action_names = self._console.action_names
        self._is_playing = False
        self._state = self._make_state(None)
        self._num_scores = 0
        self._facts: Facts = {}
        self.text_renderer = AtariRenderer(self._options.game, self._options.text_style)

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        return self._options.to_json()

    @property
    def state(self) -> AtariState:
        """The state of the current episode."""
        return self._state

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[AtariObservation]:
        """Start a game and return the first observation."""
        # The text separates these numbers from those of a player who uses random.Random(seed).
        rng = random.Random(f"atari_env {secrets.randbits(63) if seed is None else seed}")
        self._console.reset(rng, self._options.max_waiting_frames)
        self._state = self._make_state(episode_id)
        self._num_scores = 0
        self._facts = {}
        self._is_playing = True
        return self._make_transition(None)

    def step(self, action: AtariAction) -> Transition[AtariObservation]:
        """Repeat the action for `frameskip` frames and return the result.

        Raises:
            IllegalActionError: The action id does not exist.
            InvalidCallError: The action is for another game or another kind of server.
            EpisodeStateError: There is no episode, or it is over.
        """
        if not self._is_playing:
            raise EpisodeStateError(
                "an action needs a running episode; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        self._check_recipient(action)
        if not 0 <= action.action_id < len(self._action_names):
            raise IllegalActionError(
                f"expected an action from 0 to {len(self._action_names) - 1}"
                f" ({', '.join(self._action_names)}), got {action.action_id}; the game is unchanged"
            )
        points = self._console.press(action.action_id, self._options.frameskip)
        self._state.step_count += 1
        self._state.episode_return += points
        self._num_scores += points != 0
        return self._make_transition(points)

    def close(self) -> None:
        """Return the console to the pool of idle consoles."""
        self._is_playing = False
        self._console.close()

    def _make_transition(self, points: float | None) -> Transition[AtariObservation]:
        max_turns, max_scores = self._options.max_turns, self._options.max_scores
        is_terminated = self._console.is_over or bool(max_scores and self._num_scores >= max_scores)
        is_truncated = bool(not is_terminated and max_turns and self._state.step_count >= max_turns)
        self._is_playing = not (is_terminated or is_truncated)
        success = None
        if not self._is_playing and self._options.game in OPPONENT_GAMES:
            success = self._state.episode_return > 0
        screen = self._console.read_screen(self._options.obs_type)
        sends_list = self._options.obs_type == "ram" or self._options.lists_pixels
        return Transition(
            self._observe(screen, sends_list),
            points,
            is_terminated,
            is_truncated,
            tensors={} if sends_list else {"screen": screen},
            success=success,
        )

    def _observe(self, screen: np.ndarray, sends_list: bool) -> AtariObservation:
        memory = self._console.memory
        self._facts = read_facts(self._options.game, memory, self._facts)
        num_frames = self._console.num_frames
        return AtariObservation(
            screen=screen.ravel().tolist() if sends_list else None,
            screen_shape=list(screen.shape),
            legal_actions=list(range(len(self._action_names))) if self._is_playing else [],
            action_names=self._action_names,
            score=self._state.episode_return,
            lives=self._console.lives,
            episode_frame_number=num_frames,
            frame_number=num_frames,
            memory=[] if self._options.obs_type == "ram" else memory.tolist(),
            facts=self._facts,
        )

    def _check_recipient(self, action: AtariAction) -> None:
        """Refuse an action that names another game or another kind of server."""
        options = self._options
        for field, value, default_value, session_value in (
            ("game_name", action.game_name, UNNAMED_GAME, options.game),
            ("obs_type", action.obs_type, UNNAMED_OBS_TYPE, options.obs_type),
            ("full_action_space", action.full_action_space, False, options.full_action_space),
        ):
            if value not in (default_value, session_value):
                raise InvalidCallError(
                    f"this session has {field} {session_value!r}, but the action is for {value!r}; "
                    f"start a server with {value!r} or leave {field} out"
                )

    def _make_state(self, episode_id: str | None) -> AtariState:
        shared_names = AtariState.model_fields.keys() & AtariOptions.model_fields.keys()
        return AtariState(
            episode_id=episode_id,
            game_name=self._options.game,
            **{name: getattr(self._options, name) for name in shared_names},
        )
