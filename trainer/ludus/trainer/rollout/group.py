"""A group: G episodes of one task, played at once.

    one seed, and a server with room for G:   open_group ---> G sessions that begin alike --+
                                                                                            |
    seeds of their own, or an upstream server:    G opens, each by itself ----------------------+
                                                                                            v
                                                               G episodes, side by side, until
                                                               the last ends or time is up

    rollouts --reward functions, once for the group--> rewards

Sessions that are opened together are opened all or none, and the server compares their first
observations: an environment that ignores its seed is found before anything is sampled, and the
group is void.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from ludus.proto.runs import Transcript
from ludus.trainer.core.streams import Stream, derive_key
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutGroup, RolloutStatus, Sampling
from ludus.trainer.rollout.episode import Player, close_session
from ludus.trainer.rollout.rewards import PlayedEpisode
from ludus.trainer.rollout.transcript import make_transcript

_log = logging.getLogger(__name__)

_PAUSE_AFTER_FAILURE_S = 0.5


async def play_group(
    player: Player,
    spec: GroupSpec,
    sampling: Sampling,
    timeout_s: float,
    *,
    num_transcripts: int = 0,
) -> RolloutGroup:
    """The group's episodes with their rewards; those that did not end in time are lost.

    A group whose episodes begin differently on one seed, or whose reward function fails or does
    not end within another `timeout_s`, has failed as a whole: its rewards cannot be compared.

    Args:
        num_transcripts: of so many episodes it says what was said.

    Raises:
        UserError: the run cannot work as configured.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    if _opens_together(player, spec):
        played = await _play_together(player, spec, sampling, deadline_s)
    else:
        episodes = [
            player.play_alone(seed, sampling, key)
            for seed, key in zip(spec.seeds, group_keys(player.run_seed, spec), strict=True)
        ]
        played = await _play_until(deadline_s, player, episodes, spec.seeds)
    rollouts = await player.reward.score(played, timeout_s)
    await paused_where_all_failed(rollouts)
    transcripts = written(spec.index, rollouts[:num_transcripts], played[:num_transcripts])
    return RolloutGroup(spec.index, spec.environment, tuple(rollouts), transcripts)


async def paused_where_all_failed(rollouts: Sequence[Rollout]) -> None:
    """Wait: what fails at once would be replaced, and fail, a thousand times a second."""
    if all(rollout.status is RolloutStatus.FAILED for rollout in rollouts):
        await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)


def written(
    index: int, rollouts: Sequence[Rollout], played: Sequence[PlayedEpisode]
) -> tuple[Transcript, ...]:
    """What was said in the episodes, where that can be written down."""
    transcripts = []
    for number, (rollout, episode) in enumerate(zip(rollouts, played, strict=True)):
        try:
            transcripts.append(make_transcript(index, number, rollout, episode.record))
        except Exception:  # noqa: BLE001 - the boundary to messages and actions of any form
            _log.exception("an episode of '%s' cannot be written down", rollout.environment)
    return tuple(transcripts)


def _opens_together(player: Player, spec: GroupSpec) -> bool:
    return len(set(spec.seeds)) == 1 and len(spec.seeds) <= player.max_sessions


def group_keys(run_seed: int, spec: GroupSpec) -> list[int]:
    """One per episode: a group that is played again, and no other, samples the same."""
    stream = Stream.TRAINING_SAMPLING
    return [derive_key(run_seed, stream, spec.index, number) for number in range(len(spec.seeds))]


async def _play_together(
    player: Player, spec: GroupSpec, sampling: Sampling, deadline_s: float
) -> list[PlayedEpisode]:
    seeds = spec.seeds
    try:
        async with asyncio.timeout_at(deadline_s) as limit:
            opened = await player.open_group(seeds[0], len(seeds))
    except Exception as error:  # noqa: BLE001 - the boundary to code that is not ours
        reason = player.late() if limit.expired() else error
        return [player.void(seed, reason) for seed in seeds]
    episodes = [
        player.play_opened(one, seed, sampling, key)
        for one, seed, key in zip(opened, seeds, group_keys(player.run_seed, spec), strict=True)
    ]
    try:
        return await _play_until(deadline_s, player, episodes, seeds)
    finally:
        # An episode that was cancelled before its first line has closed nothing.
        for session, _ in opened:
            await close_session(session)


async def _play_until(
    deadline_s: float,
    player: Player,
    episodes: Sequence[Coroutine[Any, Any, PlayedEpisode]],
    seeds: Sequence[int],
) -> list[PlayedEpisode]:
    """What was played, one each; every episode is over, and its session freed, on every way out."""
    tasks = [asyncio.create_task(episode) for episode in episodes]
    done: set[asyncio.Task[PlayedEpisode]] = set()
    try:
        remaining_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait(tasks, timeout=remaining_s)
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
    return [
        task.result() if task in done else player.void(seed, player.late())
        for task, seed in zip(tasks, seeds, strict=True)
    ]
