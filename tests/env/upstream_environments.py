"""Environments in the style of OpenEnv 0.2 to 0.10; they need that package."""

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
    """Guess a digit within five tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, highest: int = 9):
        super().__init__()
        self._highest = highest
        self._database = sqlite3.connect(":memory:")  # refuses to be used in another thread
        self._state = GuessState(episode_id=str(uuid.uuid4()))
        self._random = random.Random()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._random = random.Random(seed)
        self._state = GuessState(
            episode_id=episode_id or "E", secret=self._random.randint(0, self._highest)
        )
        return GuessObservation(hint="guess", done=False, reward=0.0)

    def step(self, action: GuessAction, timeout_s=None, **kwargs) -> GuessObservation:  # type: ignore[override]
        self._database.execute("select 1")
        self._state.step_count += 1
        is_correct = action.number == self._state.secret
        out_of_tries = self._state.step_count >= 5
        hint = "yes" if is_correct else "higher" if action.number < self._state.secret else "lower"
        return GuessObservation(
            hint=hint,
            thread=threading.current_thread().name.rpartition("_")[0],
            done=is_correct or out_of_tries,
            reward=1.0 if is_correct else 0.0,
            metadata={"truncated": out_of_tries and not is_correct, "success": is_correct},
        )

    @property
    def state(self) -> GuessState:
        return self._state

    def close(self):
        self._database.close()


class AsyncGuessEnvironment(GuessEnvironment):
    """A guessing environment with asynchronous methods; a process can have only one."""

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


def make_guess() -> GuessEnvironment:
    return GuessEnvironment(highest=3)


app = create_app(make_guess, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=4)
