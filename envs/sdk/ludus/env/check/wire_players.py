"""Episodes over a client for the checks of the wire, which can be repeated and interleaved.

A player draws actions from the text's legal answers, from `legal_actions`, or from the action
schema, in this order. It draws again if the environment refuses an action.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.contract.schema import random_action
from ludus.env.recording.format import hash_observation
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import (
    ActionError,
    CapacityError,
    EnvError,
    ExecutionError,
    InvalidCallError,
    LudusError,
)

MAX_TRIES = 16
"""Maximum number of draws for one step."""
MAX_OPENED = 16
"""Maximum number of sessions that the checks open in parallel."""

JsonOrText = JsonObject | str
"""An action as JSON or as text."""


class NotOfferedError(LudusError):
    """A feature that the server does not have; the message names it."""


@dataclass
class CheckedServer:
    """The server under check, and the settings of its episodes."""

    client: AsyncEnvClient
    description: EnvironmentDescription
    seeds: Sequence[int]
    num_steps: int
    capacity: int = MAX_OPENED
    """Number of sessions that could be opened in parallel, at most MAX_OPENED."""
    refusal: EnvError | None = None
    """Error of the open beyond the capacity; None if MAX_OPENED sessions could be opened."""
    _opened: list[AsyncSession] = field(default_factory=list)

    @property
    def is_upstream(self) -> bool:
        """True for servers that only support OpenEnv's protocol."""
        return not self.description.server_id and not self.description.max_sessions

    def require_extras(self, feature: str) -> None:
        """Raise NotOfferedError if the server only supports OpenEnv's protocol."""
        if self.is_upstream:
            raise NotOfferedError(f"OpenEnv's protocol has no {feature}")

    async def open(self, seed: int | None) -> tuple[AsyncSession, StepResult]:
        """Open a session, which `close` closes."""
        session, first_result = await self.client.open(seed=seed)
        self._opened.append(session)
        return session, first_result

    async def start_player(self, seed: int | None, policy_seed: int = 0) -> WirePlayer:
        """Open a session and return its player."""
        session, first_result = await self.open(seed)
        return WirePlayer(self, session, first_result, policy_seed)

    async def play(
        self, seed: int | None, actions: Sequence[JsonOrText] | None = None, *, policy_seed: int = 0
    ) -> WirePlayer:
        """Play an episode with the actions, or with random actions, and close its session."""
        player = await self.start_player(seed, policy_seed)
        await player.finish(actions)
        await self.close()
        return player

    async def close(self) -> None:
        """Close all sessions; after a cancellation, the remaining sessions are dropped."""
        open_sessions, self._opened = self._opened, []
        for session in reversed(open_sessions):
            await session.close()

    async def measure_capacity(self) -> None:
        """Open sessions until the server refuses one or the maximum is reached."""
        try:
            for num_opened in range(MAX_OPENED + 1):
                self.capacity = num_opened
                session = await self.client.open_session()
                self._opened.append(session)
            self.capacity = MAX_OPENED
        except CapacityError as error:
            self.refusal = error
        except EnvError as error:
            if self.capacity == 0:
                raise
            self.refusal = error
        finally:
            await self.close()


class WirePlayer:
    """An episode that takes one step per `advance`, so that episodes can be interleaved."""

    def __init__(
        self, checked: CheckedServer, session: AsyncSession, first: StepResult, policy_seed: int
    ) -> None:
        self.session = session
        self.results = [first]
        self.actions: list[JsonOrText] = []
        self.refusals: list[EnvError] = []
        self._checked = checked
        self._generator = random.Random(f"policy {policy_seed}")

    @property
    def record(self) -> list[bytes]:
        """The episode's results for comparison."""
        return [encode_result(result) for result in self.results]

    @property
    def is_over(self) -> bool:
        """True if the environment ended the episode."""
        return self.results[-1].done

    async def finish(self, actions: Sequence[JsonOrText] | None = None) -> None:
        """Take the actions, or random actions until the end."""
        if actions is None:
            while await self.advance():
                pass
            return
        for action in actions:
            await self.take(action)

    async def advance(self) -> bool:
        """Take a step and return True, or return False at the end.

        Raises:
            EnvError: the environment refused MAX_TRIES actions.
        """
        if self.is_over or len(self.actions) >= self._checked.num_steps:
            return False
        for attempt in range(MAX_TRIES):
            action = self.choose()
            try:
                await self.take(action)
            except (ActionError, InvalidCallError, ExecutionError) as error:
                is_refusal = self._checked.is_upstream or not isinstance(error, ExecutionError)
                self.refusals.append(error)
                if not is_refusal or attempt == MAX_TRIES - 1:
                    raise
            else:
                return True
        return False

    async def take(self, action: JsonOrText) -> None:
        """Take one action and record its result."""
        if isinstance(action, str):
            result = await self.session.step(text=action)
        else:
            result = await self.session.step(action)
        self.actions.append(action)
        self.results.append(result)

    def choose(self) -> JsonOrText:
        """Draw a legal action if they are listed, or an action that fits the schema."""
        last_result = self.results[-1]
        if last_result.text is not None and last_result.text.legal_answers:
            return self._generator.choice(last_result.text.legal_answers)
        schema = self._checked.description.action_schema
        return random_action(schema, last_result.observation, self._generator)


def encode_result(result: StepResult) -> bytes:
    """Encode observation, reward, flags and a hash of the tensors as JSON with sorted keys."""
    return orjson.dumps(
        {
            "observation": result.observation,
            "reward": result.reward,
            "terminated": result.terminated,
            "truncated": result.truncated,
            "success": result.success,
            "tensors": hash_observation(None, result.tensors) if result.tensors else None,
        },
        option=orjson.OPT_SORT_KEYS,
    )
