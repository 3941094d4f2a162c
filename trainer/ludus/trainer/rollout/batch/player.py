"""Plays groups through a rollout function that takes many prompts at once.

    seeds --environment, first result--> prompts, columns
    prompts --one call--> rows --reward functions, once--> RolloutGroups like any others

The environment says what is asked; who answers, and what is done with the answers, is the
function's affair. A prompt is the `prompt` of the first result's `info`, text or messages as the
row of a data set has it, else the messages that the environment shows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ludus.env import Message, StepResult
from ludus.env.client import AsyncEnvClient
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import InfrastructureError, UserError
from ludus.trainer.core.streams import Stream, derive_key
from ludus.trainer.core.types import (
    GroupSpec,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Sampling,
    TokenSequence,
    TurnSpan,
)
from ludus.trainer.data.failures import describe, first_error
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.batch.contract import Row
from ludus.trainer.rollout.batch.function import Asked, BatchFunction, PlayedRow
from ludus.trainer.rollout.conversation import Exchanged
from ludus.trainer.rollout.episode import close_session, when_there_is_room
from ludus.trainer.rollout.group import group_keys, paused_where_all_failed, written
from ludus.trainer.rollout.renderer import ChatRenderer
from ludus.trainer.rollout.rewards import PlayedEpisode, Reward

_log = logging.getLogger(__name__)

_PROMPT = "prompt"
"""Of the first result's info: what is asked, as a data set has it."""


@dataclass(frozen=True, slots=True)
class _Game:
    """Episodes of one seed, to be played."""

    seed: int
    keys: Sequence[int]
    """One per episode: what its random numbers come from."""


class BatchPlayer:
    """Groups of one environment, those that are asked for together in one call."""

    def __init__(
        self,
        run: LanguageModelRun,
        environment: str,
        client: AsyncEnvClient,
        renderer: ChatRenderer,
        chat: ChatTokenizer,
        function: BatchFunction,
        reward: Reward,
    ) -> None:
        self._run = run
        self._environment = environment
        self._client = client
        self._renderer = renderer
        self._chat = chat
        self._function = function
        self._reward = reward
        self._place = list(run.environments).index(environment)

    async def play_groups(
        self, specs: Sequence[GroupSpec], sampling: Sampling, num_transcripts: Sequence[int]
    ) -> list[RolloutGroup]:
        """The groups with their rewards; all of them have failed where the function has.

        Args:
            num_transcripts: of so many episodes each group says what was said.

        Raises:
            UserError: the run cannot work as configured.
        """
        games = [_Game(spec.seeds[0], group_keys(self._run.seed, spec)) for spec in specs]
        played = await self._play(games, sampling, is_trained_on=True)
        rollouts = await self._reward.score(played, self._run.rollout.group_timeout_s)
        await paused_where_all_failed(rollouts)
        groups, begin = [], 0
        for spec, number in zip(specs, num_transcripts, strict=True):
            rows = slice(begin, begin + len(spec.seeds))
            begin = rows.stop
            own = [_worth_its_reward(rollout) for rollout in rollouts[rows]]
            said = written(spec.index, own[:number], played[rows][:number])
            groups.append(RolloutGroup(spec.index, spec.environment, tuple(own), said))
        return groups

    async def play_games(self, seeds: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One episode per seed, of an evaluation; their returns are what rewards say of them."""
        rollout = self._run.rollout
        most = rollout.num_groups_in_flight * rollout.group_size
        rollouts: list[Rollout] = []
        for begin in range(0, len(seeds), most):
            games = [_Game(seed, [self._eval_key(seed)]) for seed in seeds[begin : begin + most]]
            played = await self._play(games, sampling, is_trained_on=False)
            scored = await self._reward.score(played, rollout.group_timeout_s)
            rollouts += map(_worth_its_reward, scored)
        return rollouts

    def _eval_key(self, seed: int) -> int:
        return derive_key(self._run.seed, Stream.EVALUATION_SAMPLING, self._place, seed)

    async def _play(
        self, games: Sequence[_Game], sampling: Sampling, *, is_trained_on: bool
    ) -> list[PlayedEpisode]:
        """The episodes, game by game."""
        openings = await asyncio.gather(*(self._ask(game.seed) for game in games))
        asked = [one for one in openings if isinstance(one, Asked)]
        rows: list[PlayedRow] | Exception = []
        if asked:
            playing = [
                game for game, one in zip(games, openings, strict=True) if isinstance(one, Asked)
            ]
            try:
                rows = await self._function.play(
                    asked,
                    len(games[0].keys),
                    sampling,
                    [key for game in playing for key in game.keys],
                    is_trained_on=is_trained_on,
                )
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary to code that is not ours
                rows = error
        left = iter(rows if isinstance(rows, list) else ())
        return [
            self._episode(game.seed, opening, rows if isinstance(rows, Exception) else next(left))
            if isinstance(opening, Asked)
            else self._void(game.seed, opening)
            for game, opening in zip(games, openings, strict=True)
            for _ in game.keys
        ]

    async def _ask(self, seed: int) -> Asked | Exception:
        """What the episode of a seed begins with, or why it does not."""
        try:
            session, first = await when_there_is_room(lambda: self._client.open(seed=seed))
            try:
                return self._asked(first)
            finally:
                await close_session(session)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to code that is not ours
            return error

    def _asked(self, first: StepResult) -> Asked:
        metadata = first.observation.get("metadata")
        columns = {**(metadata if isinstance(metadata, dict) else {}), **first.info}
        prompt = columns.pop(_PROMPT, None)
        if not isinstance(prompt, str):
            prompt = self._renderer.messages(first, first=True)
        return Asked(prompt, columns)

    def _episode(self, seed: int, asked: Asked, row: PlayedRow | Exception) -> PlayedEpisode:
        if isinstance(row, Exception):
            return self._void(seed, row)
        sequence, text = _sequence_of(row), self._chat.decode(row.row.completion_ids)
        is_ended = row.row.completion_ids[-1] == self._chat.end_token_id
        rollout = Rollout(
            environment=self._environment,
            seed=seed,
            sequences=(sequence,),
            reward=None,
            episode_return=None,
            terms=(),
            status=RolloutStatus.TERMINATED if is_ended else RolloutStatus.TRUNCATED,
            policy_version=row.policy_version,
            num_tool_calls=_count(row.row.fields, "num_tool_calls"),
            num_tool_calls_failed=_count(row.row.fields, "num_tool_calls_failed"),
        )
        is_text = isinstance(asked.prompt, str)
        return PlayedEpisode(
            rollout,
            prompt=asked.prompt,
            completion=text if is_text else [{"role": "assistant", "content": text}],
            completion_ids=row.row.completion_ids,
            fields={**asked.columns, **row.row.fields},
            record=_Said(self._chat, asked.prompt, row.row),
        )

    def _void(self, seed: int, error: Exception) -> PlayedEpisode:
        is_lost = isinstance(first_error(error), InfrastructureError)
        status = RolloutStatus.LOST if is_lost else RolloutStatus.FAILED
        reason = describe(error)
        return PlayedEpisode(
            Rollout(self._environment, seed, (), None, None, (), status, 0, reason)
        )


@dataclass(frozen=True, slots=True)
class _Said:
    """A row as text."""

    chat: ChatTokenizer
    prompt: str | list[Message]
    row: Row

    @property
    def num_turns(self) -> int:
        """Answers."""
        return len(list(self.row.sampled_spans))

    def exchanges(self) -> Iterator[Exchanged]:
        """The answers, with what was said before each; what each has earned is not known."""
        prompt = self.prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        shown, last = list(prompt), 0
        for begin, end in self.row.sampled_spans:
            if begin > last:
                said = self.chat.decode(self.row.completion_ids[last:begin])
                shown = [*shown, {"role": "environment", "content": said}]
            answer = self.chat.decode(self.row.completion_ids[begin:end])
            yield Exchanged(shown, answer, None, 0.0)
            shown, last = [], end


def _count(fields: Mapping[str, Any], name: str) -> int:
    """What a rollout function says that it has counted; 0 where it says nothing."""
    value = fields.get(name, 0)
    return value if isinstance(value, int) else 0


def _sequence_of(played: PlayedRow) -> TokenSequence:
    """The row as the learner takes it: each run of sampled tokens is a turn."""
    row = played.row
    start = len(row.prompt_ids)
    logprobs = np.zeros(start + len(row.completion_ids), dtype=np.float32)
    logprobs[start:] = np.where(row.is_sampled, row.logprobs, 0.0)
    turns = tuple(TurnSpan(start + begin, start + end, 0.0) for begin, end in row.sampled_spans)
    token_ids = np.array([*row.prompt_ids, *row.completion_ids], dtype=np.int32)
    return TokenSequence(token_ids, logprobs, turns)


def _worth_its_reward(rollout: Rollout) -> Rollout:
    """The rollout, its return what its rewards say: nobody else knows what it is worth."""
    return replace(rollout, episode_return=rollout.reward)
