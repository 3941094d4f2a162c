"""A group: G episodes of one task, played at once.

    one seed, and a server with room for G:   open_group ---> G sessions that begin alike --+
                                                                                            |
    seeds of their own, or an upstream server:    G opens, each by itself ----------------------+
                                                                                            v
                                                               G episodes, side by side, until
                                                               the last ends or time is up

    rollouts --reward functions, once for the group--> rewards

Sessions that are opened together are opened all or none, and the server compares their first
observations: an environment that ignores its seed is found before anything is sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from ludus.proto.errors import InfrastructureError
from ludus.trainer.rollout.episode import Player, close_session
from ludus.trainer.rollout.rewards import PlayedEpisode
from ludus.trainer.rollout.seeds import mix
from ludus.trainer.rollout.transcript import make_transcript
from ludus.trainer.types import GroupSpec, RolloutGroup, Sampling

_NUM_SEEDS = 2**30


async def play_group(
    player: Player,
    spec: GroupSpec,
    sampling: Sampling,
    timeout_s: float,
    *,
    num_transcripts: int = 0,
) -> RolloutGroup:
    """The group's episodes with their rewards; those that did not end in time are lost.

    Args:
        num_transcripts: of so many episodes it says what was said.

    Raises:
        RewardFunctionError: a reward function failed, or did not end within another `timeout_s`.
        GroupMismatchError: episodes of one seed begin differently; their rewards cannot be
            compared, so nothing may be learned from them.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    if _opens_together(player, spec):
        played = await _play_together(player, spec, sampling, deadline_s)
    else:
        episodes = [
            player.play_alone(seed, sampling, index)
            for seed, index in zip(spec.seeds, _sample_indices(spec), strict=True)
        ]
        played = await _play_until(deadline_s, player, episodes, spec.seeds)
    rollouts = await player.reward.score(played, timeout_s)
    transcripts = [
        make_transcript(spec.index, number, rollout, episode.conversation)
        for number, (rollout, episode) in enumerate(zip(rollouts, played, strict=True))
        if number < num_transcripts and episode.conversation is not None
    ]
    return RolloutGroup(spec.index, spec.environment, tuple(rollouts), tuple(transcripts))


def _opens_together(player: Player, spec: GroupSpec) -> bool:
    return len(set(spec.seeds)) == 1 and len(spec.seeds) <= player.max_sessions


def _sample_indices(spec: GroupSpec) -> list[int]:
    """One per episode: a group that is played again, and no other, samples the same."""
    return [mix(spec.index, number) for number in range(len(spec.seeds))]


async def _play_together(
    player: Player, spec: GroupSpec, sampling: Sampling, deadline_s: float
) -> list[PlayedEpisode]:
    seeds = spec.seeds
    try:
        async with asyncio.timeout_at(deadline_s):
            opened = await player.open_group(seeds[0], len(seeds))
    except (InfrastructureError, TimeoutError):
        return [player.lost(seed) for seed in seeds]
    episodes = [
        player.play_opened(one, seed, sampling, index)
        for one, seed, index in zip(opened, seeds, _sample_indices(spec), strict=True)
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
        task.result() if task in done else player.lost(seed)
        for task, seed in zip(tasks, seeds, strict=True)
    ]


def group_seeds(run_seed: int, index: int, group_size: int, *, shared: bool) -> tuple[int, ...]:
    """[G] the seeds of group `index`: below 2**30, so never those of an evaluation."""
    if shared:
        return (mix(run_seed, index) % _NUM_SEEDS,) * group_size
    return tuple(mix(run_seed, index, number + 1) % _NUM_SEEDS for number in range(group_size))
