"""Load of a rollout worker on a blackjack server; `bench/environments.py` starts this program.

    program ADDRESS

Plays like a rollout worker with `examples/blackjack/tiny.toml`: groups of episodes with one seed,
the configured number at a time, with the worker's code and with text. Only the engine is replaced:
the tokens of a legal completion are available immediately. Each line of standard input is a number
of seconds. The output is one line of JSON with the steps and episodes played in that time, and the
processor time of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from environment_load import Counts, answer_windows

from ludus.env.client import AsyncEnvClient
from ludus.env.runtime import freeze_heap
from ludus.proto.config import LanguageModelRun, TinyModel, load_run_config
from ludus.trainer.core.types import GroupSpec, SampledCompletion, Sampling
from ludus.trainer.data.mixture import derive_group_seeds
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.group import GroupPlayer
from ludus.trainer.rollout.rewards.reward_models import RewardModels
from ludus.trainer.rollout.runner import RunnerComponents

RUN = Path(__file__).parents[1] / "examples" / "blackjack" / "tiny.toml"
RESPONSES = ("HIT", "STAND")


class InstantGenerator:
    """Returns a legal completion, selected by the seed, without delay."""

    def __init__(self, chat: ChatTokenizer) -> None:
        token_ids = [chat.encode_completion(response) for response in RESPONSES]
        self._completions = [
            SampledCompletion(ids, [0.0] * len(ids), 0, has_end_token=True) for ids in token_ids
        ]

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        """Return the tokens of a completion."""
        return self._completions[seed % len(self._completions)]


async def play_groups(
    run: LanguageModelRun,
    player: GroupPlayer,
    indices: Iterator[int],
    until_s: float,
    counts: Counts,
) -> None:
    """Play groups one after another until the time is over."""
    rollout = run.rollout
    sampling = Sampling(rollout.temperature, rollout.max_completion_tokens, rollout.top_p)
    while time.perf_counter() < until_s:
        index = next(indices)
        seeds = derive_group_seeds(run.seed, index, rollout.group_size, shared=True)
        [environment] = run.environments
        spec = GroupSpec(index, environment, seeds)
        [group] = await player.play_groups([spec], sampling, [0])
        counts.resets += len(group.rollouts)
        counts.steps += sum(len(episode.turns) for episode in group.rollouts)


async def serve_windows(run: LanguageModelRun, address: str, chat: ChatTokenizer) -> None:
    """Play for each line of standard input, until its end."""
    async with await AsyncEnvClient.connect(address) as client:
        (name,) = run.environments
        engine: Any = InstantGenerator(chat)
        components = RunnerComponents(run, name, client, engine, chat, AsyncExitStack())
        player = await GroupPlayer.start(components, RewardModels())
        indices = itertools.count()
        freeze_heap()

        async def play(until_s: float, counts: Counts) -> None:
            async with asyncio.TaskGroup() as slots:
                for _ in range(run.rollout.num_groups_in_flight):
                    slots.create_task(play_groups(run, player, indices, until_s, counts))

        await answer_windows(play)


def main() -> None:
    """Run the load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    arguments = parser.parse_args()
    run = load_run_config(RUN, [])
    tokenizer = make_tokenizer(["hard 16 vs 10", *RESPONSES], TinyModel().vocab_size)
    uvloop.run(serve_windows(run, arguments.address, ChatTokenizer(tokenizer)))


if __name__ == "__main__":
    main()
