"""Episodes for the checks of servers. They are played over a client, repeated and interleaved.

A player draws its actions from the first available source: the legal answers of the text view,
`legal_actions`, or the action schema. It draws again if the environment refuses an action.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import orjson

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.contract.schema import draw_action
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

MAX_DRAWS_PER_STEP = 16
"""Maximum number of actions to draw for one step."""
MAX_SESSIONS = 16
"""Maximum number of sessions that the checks open at the same time."""

JsonOrText = JsonObject | str
"""An action as JSON or as text."""


class NotOfferedError(LudusError):
    """The server does not have a feature. The message names the feature."""


@dataclass
class CheckedServer:
    """The server under check, and the settings of its episodes."""

    client: AsyncEnvClient
    description: EnvironmentDescription
    seeds: Sequence[int]
    num_steps: int
    capacity: int = MAX_SESSIONS
    """Number of sessions that could be open at the same time, at most MAX_SESSIONS."""
    capacity_error: EnvError | None = None
    """Error of the open that exceeded the capacity; None if there was no such error."""
    max_open_s: float = 10.0
    """Time after which a further open counts as waiting in a queue, in seconds."""
    has_queue: bool = False
    """True if the open that exceeded the capacity waited, as behind a gateway."""
    _sessions: list[AsyncSession] = field(default_factory=list)

    @property
    def is_upstream(self) -> bool:
        """True for servers that only support OpenEnv's protocol."""
        return not self.description.server_id and not self.description.max_sessions

    def require_extensions(self, feature: str) -> None:
        """Raise NotOfferedError if the server only supports OpenEnv's protocol."""
        if self.is_upstream:
            raise NotOfferedError(f"OpenEnv's protocol has no {feature}")

    async def open(self, seed: int | None) -> tuple[AsyncSession, StepResult]:
        """Open a session until the next `close`."""
        session, first_result = await self.client.open(seed=seed)
        self._sessions.append(session)
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
        await player.play_to_end(actions)
        await self.close()
        return player

    async def close(self) -> None:
        """Close all sessions. A cancelled `close` forgets the remaining sessions."""
        open_sessions, self._sessions = self._sessions, []
        for session in reversed(open_sessions):
            await session.close()

    async def measure_capacity(self) -> None:
        """Open sessions until one is refused or waits, or the maximum is reached."""
        try:
            for num_sessions in range(MAX_SESSIONS):
                self.capacity = num_sessions
                # The first open may wait until a server starts.
                async with asyncio.timeout(self.max_open_s if num_sessions else None):
                    self._sessions.append(await self.client.open_session())
            self.capacity = MAX_SESSIONS
        except TimeoutError:
            self.has_queue = True
        except EnvError as error:
            if self.capacity == 0 and not isinstance(error, CapacityError):
                raise
            self.capacity_error = error
        finally:
            await self.close()


class WirePlayer:
    """An episode that is played step by step, so that episodes can be interleaved."""

    def __init__(
        self,
        server: CheckedServer,
        session: AsyncSession,
        first_result: StepResult,
        policy_seed: int,
    ) -> None:
        self.session = session
        self.results = [first_result]
        self.actions: list[JsonOrText] = []
        self.refusals: list[EnvError] = []
        self._server = server
        self._generator = random.Random(f"policy {policy_seed}")

    @property
    def record(self) -> list[bytes]:
        """The results of the episode as bytes, for comparison."""
        return [encode_result(result) for result in self.results]

    @property
    def is_over(self) -> bool:
        """True if the environment ended the episode."""
        return self.results[-1].done

    async def play_to_end(self, actions: Sequence[JsonOrText] | None = None) -> None:
        """Take the actions. Without actions, take random actions until the end."""
        if actions is None:
            while await self.take_random_step():
                pass
            return
        for action in actions:
            await self.take_action(action)

    async def take_random_step(self) -> bool:
        """Take a step and return True, or return False at the end.

        Raises:
            EnvError: the environment refused MAX_DRAWS_PER_STEP actions.
        """
        if self.is_over or len(self.actions) >= self._server.num_steps:
            return False
        for draw_index in range(MAX_DRAWS_PER_STEP):
            action = self.choose_action()
            try:
                await self.take_action(action)
            except (ActionError, InvalidCallError, ExecutionError) as error:
                is_refusal = self._server.is_upstream or not isinstance(error, ExecutionError)
                self.refusals.append(error)
                if not is_refusal or draw_index == MAX_DRAWS_PER_STEP - 1:
                    raise
            else:
                return True
        return False

    async def take_action(self, action: JsonOrText) -> None:
        """Take one action and record its result."""
        result = await take_step(self.session, action)
        self.actions.append(action)
        self.results.append(result)

    def choose_action(self) -> JsonOrText:
        """Draw a legal action if they are listed, or an action that fits the schema."""
        last_result = self.results[-1]
        if last_result.text is not None and last_result.text.legal_answers:
            return self._generator.choice(last_result.text.legal_answers)
        schema = self._server.description.action_schema
        return draw_action(schema, last_result.observation, self._generator)


def take_step(session: AsyncSession, action: JsonOrText) -> Awaitable[StepResult]:
    """Take a step with an action as JSON or as text."""
    return session.step(text=action) if isinstance(action, str) else session.step(action)


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
