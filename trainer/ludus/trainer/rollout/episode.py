"""One episode: the policy and the environment in turns.

        messages             prompt tokens           sampled tokens
    env ---------> chat ----------------> generate ------------------> text
     ^                                                                  |
     +------------------------------- step <----------------------------+

An episode that infrastructure ended is data with status LOST and reward None.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ludus.env import StepResult
from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ActionError, CapacityError, InfrastructureError
from ludus.trainer.interfaces import GenerateFn
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.face import Face
from ludus.trainer.types import Rollout, RolloutStatus, Sampling, ScoredTerm, Turn, join_turns

Opened: TypeAlias = tuple[AsyncSession, StepResult]
"""A session with the first result of its episode."""

_OpenedT = TypeVar("_OpenedT")

_FULL_SERVER_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Player:
    """What it takes to play: the environment, the policy, and the language between them."""

    environment: str
    """Its name in the run."""
    client: AsyncEnvClient
    generate: GenerateFn
    chat: ChatTokenizer
    face: Face
    limits: RolloutConfig
    max_sessions: int = 0
    """That the environment holds at once; 0 where it does not say."""

    async def play(self, seed: int, sampling: Sampling) -> Rollout:
        """One episode of the deal `seed`."""
        try:
            opened = await _when_there_is_room(
                lambda: self.client.open(seed=seed, close_when_done=True)
            )
        except InfrastructureError:
            return _Episode(self, seed, sampling).end(RolloutStatus.LOST)
        return await self.play_opened(opened, seed, sampling)

    async def play_opened(self, opened: Opened, seed: int, sampling: Sampling) -> Rollout:
        """The episode that has begun in a session; the session is closed at its end."""
        episode = _Episode(self, seed, sampling)
        session, first = opened
        try:
            return episode.end(await episode.run(session, first))
        except InfrastructureError:
            return episode.end(RolloutStatus.LOST)
        finally:
            if not episode.is_over:
                await close_session(session)

    async def open_group(self, seed: int, size: int) -> list[Opened]:
        """Sessions whose episodes begin alike, all or none; waits while the server is full.

        Raises:
            GroupMismatchError: the environment does not follow its seed.
            InfrastructureError: the server is away and did not come back in time.
        """
        return await _when_there_is_room(
            lambda: self.client.open_group(size, seed=seed, close_when_done=True)
        )


class _Episode:
    """The state of one episode while it is played."""

    def __init__(self, player: Player, seed: int, sampling: Sampling) -> None:
        self._player = player
        self._seed = seed
        self._sampling = sampling
        self._turns: list[Turn] = []
        self.is_over = False
        """True when the server has ended the episode and freed the session by itself."""

    async def run(self, session: AsyncSession, result: StepResult) -> RolloutStatus:
        """How the episode ended; turns and return are collected on the way."""
        player, chat = self._player, self._player.chat
        token_ids = prompt_ids = chat.first_prompt(player.face.messages(result, first=True))
        while self._has_room(len(token_ids)):
            completion = await player.generate(token_ids, self._sampling, self._request_seed())
            text = chat.decode(completion.token_ids)
            try:
                result = await session.step(**player.face.action(text, result))
            except ActionError:
                reward = player.limits.invalid_action_reward
                self._turns.append(Turn(prompt_ids, completion, reward))
                return RolloutStatus.INVALID_ACTION
            self._turns.append(Turn(prompt_ids, completion, result.reward or 0.0))
            if result.done:
                self.is_over = True
                ended = result.terminated
                return RolloutStatus.TERMINATED if ended else RolloutStatus.TRUNCATED
            messages = player.face.messages(result, first=False)
            prompt_ids = chat.next_prompt(messages, ended=completion.stopped)
            token_ids = [*token_ids, *completion.token_ids, *prompt_ids]
        return RolloutStatus.TRUNCATED

    def end(self, status: RolloutStatus) -> Rollout:
        """The finished rollout; without a reward when it was lost or nothing was sampled."""
        scored = status is not RolloutStatus.LOST and self._turns
        paid = sum(turn.reward for turn in self._turns) if scored else None
        versions: Sequence[int] = [turn.completion.policy_version for turn in self._turns]
        return Rollout(
            environment=self._player.environment,
            seed=self._seed,
            sequences=(join_turns(self._turns),) if self._turns else (),
            reward=paid,
            episode_return=paid,
            terms=(ScoredTerm("environment", paid),),
            status=status,
            policy_version=min(versions, default=0),
        )

    def _request_seed(self) -> int:
        """Differs between turns; those of one seed's episodes differ by their sampling's salt."""
        return self._seed * 64 + len(self._turns)

    def _has_room(self, num_tokens: int) -> bool:
        limits = self._player.limits
        fits = num_tokens + limits.max_completion_tokens <= limits.max_tokens
        return fits and len(self._turns) < limits.max_turns


async def close_session(session: AsyncSession) -> None:
    """Returns when the session is freed, by this call or by what happened before."""
    try:
        await session.close()
    except InfrastructureError:
        # The session died with its server: nothing is left to free.
        return


async def _when_there_is_room(open_: Callable[[], Awaitable[_OpenedT]]) -> _OpenedT:
    while True:
        try:
            return await open_()
        except CapacityError:
            # Others of this run hold the sessions, and give them back when they are done.
            await asyncio.sleep(_FULL_SERVER_PAUSE_S)
