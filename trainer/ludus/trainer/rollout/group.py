"""A group: G episodes of one task, played at once.

    one seed, and a server with room for G:   open_group ---> G sessions that begin alike --+
                                                                                            |
    seeds of their own, or a stock server:    G opens, each by itself ----------------------+
                                                                                            v
                                                               G episodes, side by side, until
                                                               the last ends or time is up

Sessions that are opened together are opened all or none, and the server compares their first
observations: an environment that ignores its seed is found before anything is sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from ludus.proto.errors import InfrastructureError
from ludus.trainer.rollout.episode import Player, close_session
from ludus.trainer.types import GroupSpec, Rollout, RolloutGroup, RolloutStatus, Sampling


async def play_group(
    player: Player, spec: GroupSpec, sampling: Sampling, timeout_s: float
) -> RolloutGroup:
    """The group's episodes; those that did not end in time are lost.

    Raises:
        GroupMismatchError: episodes of one seed begin differently; their rewards cannot be
            compared, so nothing may be learned from them.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    if _opens_together(player, spec):
        rollouts = await _play_together(player, spec.seeds, sampling, deadline_s)
    else:
        episodes = [player.play(seed, sampling) for seed in spec.seeds]
        rollouts = await _play_until(deadline_s, player, episodes, spec.seeds)
    return RolloutGroup(spec.index, spec.environment, tuple(rollouts))


def _opens_together(player: Player, spec: GroupSpec) -> bool:
    return len(set(spec.seeds)) == 1 and len(spec.seeds) <= player.max_sessions


async def _play_together(
    player: Player, seeds: Sequence[int], sampling: Sampling, deadline_s: float
) -> list[Rollout]:
    try:
        async with asyncio.timeout_at(deadline_s):
            opened = await player.open_group(seeds[0], len(seeds))
    except (InfrastructureError, TimeoutError):
        return [_lost(player, seed) for seed in seeds]
    episodes = [
        player.play_opened(one, seed, sampling) for one, seed in zip(opened, seeds, strict=True)
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
    episodes: Sequence[Coroutine[Any, Any, Rollout]],
    seeds: Sequence[int],
) -> list[Rollout]:
    """One rollout per episode; every episode is over, and its session freed, on every way out."""
    tasks = [asyncio.create_task(episode) for episode in episodes]
    done: set[asyncio.Task[Rollout]] = set()
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
        task.result() if task in done else _lost(player, seed)
        for task, seed in zip(tasks, seeds, strict=True)
    ]


def group_seeds(run_seed: int, index: int, group_size: int, *, shared: bool) -> tuple[int, ...]:
    """[G] the seeds of group `index`: below 2**30, so never those of an evaluation."""
    if shared:
        return (_mix(run_seed, index),) * group_size
    return tuple(_mix(run_seed, index * group_size + i) for i in range(group_size))


def _mix(run_seed: int, counter: int) -> int:
    """A 30-bit seed; splitmix64's finaliser spreads neighbouring counters."""
    value = (run_seed * 0x9E3779B97F4A7C15 + counter * 0xD1342543DE82EF95 + 1) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return (value ^ (value >> 31)) % 2**30


def _lost(player: Player, seed: int) -> Rollout:
    return Rollout(player.environment, seed, (), None, None, (), RolloutStatus.LOST, 0)
