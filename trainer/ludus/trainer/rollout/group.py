"""A group: G episodes of one task, played at once."""

from __future__ import annotations

import asyncio

from ludus.trainer.rollout.episode import Player
from ludus.trainer.types import GroupSpec, Rollout, RolloutGroup, RolloutStatus, Sampling


async def play_group(
    player: Player, spec: GroupSpec, sampling: Sampling, timeout_s: float
) -> RolloutGroup:
    """The group's episodes; those that did not end in time are lost."""
    tasks = [asyncio.create_task(player.play(seed, sampling)) for seed in spec.seeds]
    done, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)
    rollouts = [
        task.result() if task in done else _lost(seed)
        for task, seed in zip(tasks, spec.seeds, strict=True)
    ]
    return RolloutGroup(spec.index, tuple(rollouts))


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


def _lost(seed: int) -> Rollout:
    return Rollout(seed, [], [], [], None, RolloutStatus.LOST, 0, 0)
