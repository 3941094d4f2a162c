"""Environments for OpenEnv 0.2 to 0.10. Importing this module requires OpenEnv."""

from __future__ import annotations

import random
import sqlite3
import threading
import uuid

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class GuessAction(Action):
    number: int = Field(ge=0, le=9)


class GuessObservation(Observation):
    hint: str
    thread: str = ""


class GuessState(State):
    secret: int = 0


class GuessEnvironment(Environment):
    """A game in which the agent guesses a digit within five tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, max_number: int = 9):
        super().__init__()
        self._max_number = max_number
        self._database = sqlite3.connect(":memory:")  # raises an error in other threads
        self._state = GuessState(episode_id=str(uuid.uuid4()))
        self._random = random.Random()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._random = random.Random(seed)
        self._state = GuessState(
            episode_id=episode_id or "E", secret=self._random.randint(0, self._max_number)
        )
        return GuessObservation(hint="guess", done=False, reward=0.0)

    def step(self, action: GuessAction, timeout_s=None, **kwargs) -> GuessObservation:  # type: ignore[override]
        self._database.execute("select 1")
        self._state.step_count += 1
        is_correct = action.number == self._state.secret
        is_last_try = self._state.step_count >= 5
        hint = "yes" if is_correct else "higher" if action.number < self._state.secret else "lower"
        return GuessObservation(
            hint=hint,
            thread=threading.current_thread().name.rpartition("_")[0],
            done=is_correct or is_last_try,
            reward=1.0 if is_correct else 0.0,
            metadata={"truncated": is_last_try and not is_correct, "success": is_correct},
        )

    @property
    def state(self) -> GuessState:
        return self._state

    def close(self):
        self._database.close()


class AsyncGuessEnvironment(GuessEnvironment):
    """A guessing environment with asynchronous methods, limited to one instance per process."""

    SUPPORTS_CONCURRENT_SESSIONS = False

    async def reset_async(self, seed=None, episode_id=None, **kwargs):
        return GuessEnvironment.reset(self, seed, episode_id)

    async def step_async(self, action: GuessAction, timeout_s=None, **kwargs):
        return GuessEnvironment.step(self, action)

    def step(self, action: GuessAction, timeout_s=None, **kwargs) -> GuessObservation:
        raise NotImplementedError("use step_async")


class OneThreadEnvironment(GuessEnvironment):
    """An environment whose sessions share one thread."""

    REQUIRES_SINGLE_THREAD_EXECUTOR = True


def make_guess_environment() -> GuessEnvironment:
    return GuessEnvironment(max_number=3)


app = create_app(
    make_guess_environment, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=4
)
