"""How the wire checks play: episodes over a client, repeatable and interleavable.

A player chooses among the text's legal answers, else among `legal_actions`, else it draws
from the action schema; what the environment refuses is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from ludus.env.client.client import AsyncEnvClient, AsyncSession
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
"""Draws for one step before a player gives up."""
MAX_OPENED = 16
"""Sessions that the checks open at once."""

Played = JsonObject | str
"""An action as JSON, or a text."""


class NotOfferedError(LudusError):
    """What a rule is about is not there; the message says what is missing."""


@dataclass
class CheckedServer:
    """The server under check, and how its episodes are played."""

    client: AsyncEnvClient
    description: EnvironmentDescription
    seeds: Sequence[int]
    num_steps: int
    capacity: int = MAX_OPENED
    """Sessions that could be opened at once, at most MAX_OPENED."""
    refusal: EnvError | None = None
    """How one more was refused; None where none was."""
    _opened: list[AsyncSession] = field(default_factory=list)

    @property
    def is_upstream(self) -> bool:
        """True for servers that know nothing beyond OpenEnv."""
        return not self.description.server_id and not self.description.max_sessions

    def require_extras(self, what: str) -> None:
        """Raise NotOfferedError where the server knows no more than OpenEnv's protocol."""
        if self.is_upstream:
            raise NotOfferedError(f"OpenEnv's protocol has no {what}")

    async def open(self, seed: int | None) -> tuple[AsyncSession, StepResult]:
        """A new session, which `close` closes."""
        session, first = await self.client.open(seed=seed)
        self._opened.append(session)
        return session, first

    async def player(self, seed: int | None, policy_seed: int = 0) -> WirePlayer:
        """A player whose session is open."""
        session, first = await self.open(seed)
        return WirePlayer(self, session, first, policy_seed)

    async def play(
        self, seed: int | None, actions: Sequence[Played] | None = None, *, policy_seed: int = 0
    ) -> WirePlayer:
        """A finished player, whose session is closed: of random actions, or of the given ones."""
        player = await self.player(seed, policy_seed)
        await player.finish(actions)
        await self.close()
        return player

    async def close(self) -> None:
        """Close every session that was opened; where that is cut off, the others are let go."""
        opened, self._opened = self._opened, []
        for session in reversed(opened):
            await session.close()

    async def measure_capacity(self) -> None:
        """Open sessions until one is refused, or enough are open."""
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
    """One episode, a step per `advance`, so that several can take turns."""

    def __init__(
        self, checked: CheckedServer, session: AsyncSession, first: StepResult, policy_seed: int
    ) -> None:
        self.session = session
        self.results = [first]
        self.actions: list[Played] = []
        self.refusals: list[EnvError] = []
        self._checked = checked
        self._generator = random.Random(f"policy {policy_seed}")

    @property
    def record(self) -> list[bytes]:
        """What the episode returned, for comparison."""
        return [record_of(result) for result in self.results]

    @property
    def is_over(self) -> bool:
        """True when the environment ended the episode."""
        return self.results[-1].done

    async def finish(self, actions: Sequence[Played] | None = None) -> None:
        """Plays to the end: random actions, or the given ones."""
        if actions is None:
            while await self.advance():
                pass
            return
        for action in actions:
            await self.take(action)

    async def advance(self) -> bool:
        """True when a step was taken.

        Raises:
            EnvError: of the last of MAX_TRIES actions that were all refused.
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

    async def take(self, action: Played) -> None:
        """Take one action and note its result."""
        if isinstance(action, str):
            result = await self.session.step(text=action)
        else:
            result = await self.session.step(action)
        self.actions.append(action)
        self.results.append(result)

    def choose(self) -> Played:
        """A legal action where they are listed, else one that fits the schema."""
        last = self.results[-1]
        if last.text is not None and last.text.legal_answers:
            return self._generator.choice(last.text.legal_answers)
        schema = self._checked.description.action_schema
        return random_action(schema, last.observation, self._generator)


def record_of(result: StepResult) -> bytes:
    """Observation, reward and flags as JSON with sorted keys, and a hash of the tensors."""
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
