"""Evaluate weights at blackjack in the same way for every trainer.

    weights (safetensors) --> one engine --> 4,000 games of the same deals --> win rate

Prints one JSON object: file -> share of games won. `bench/speedup.py` runs this program in a
separate process after all training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import LanguageModelRun, TransformersGenerator
from ludus.trainer.core.types import Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.engines.async_engine import AsyncEngine, make_engine
from ludus.trainer.rollout.group import GroupPlayer
from ludus.trainer.rollout.rewards.reward_models import RewardModels
from ludus.trainer.rollout.runner import RunnerComponents

MAX_SESSIONS = 1024
FIRST_SEED = 2**31


async def judge(
    run: LanguageModelRun, model: str, files: Sequence[Path], num_games: int
) -> list[float]:
    """Return the share of games won with each file's weights, at temperature 1."""
    [name] = run.environments
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "environment.log"
        server = LocalServer("openspiel_env", {"game": "blackjack"}, MAX_SESSIONS, log)
        address = server.start().grpc
        try:
            async with await AsyncEnvClient.connect(address) as client:
                chat = ChatTokenizer.load(model, run.model)
                engine = AsyncEngine(make_engine(run, model, chat))
                components = RunnerComponents(run, name, client, engine, chat, AsyncExitStack())
                player = await GroupPlayer.start(components, RewardModels())
                shares = []
                for version, file in enumerate(files):
                    await engine.load_weights(load_file(file), version)
                    shares.append(await _share_won(player, num_games))
                engine.close()
        finally:
            server.stop()
    return shares


async def _share_won(player: GroupPlayer, num_games: int) -> float:
    free_sessions = asyncio.Semaphore(MAX_SESSIONS)

    async def is_won(seed: int) -> bool:
        async with free_sessions:
            [rollout] = await player.evaluate([seed], Sampling(1.0, 4))
        assert rollout.episode_return is not None, "a game was lost to the infrastructure"
        return rollout.episode_return > 0

    games = [is_won(FIRST_SEED + index) for index in range(num_games)]
    return sum(await asyncio.gather(*games)) / num_games


def main() -> None:
    """Evaluate the files of the command line."""
    parser = argparse.ArgumentParser(description="Evaluate weights at blackjack.")
    parser.add_argument("config", type=Path, help="config.json of the initial model's run")
    parser.add_argument("model", help="folder of the initial model")
    parser.add_argument("files", type=Path, nargs="+", help="weights, as safetensors")
    parser.add_argument("--games", type=int, default=4000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = LanguageModelRun.model_validate_json(args.config.read_text(encoding="utf-8"))
    # All weights are evaluated with the same engine.
    run = run.model_copy(update={"generator": TransformersGenerator()})
    shares = asyncio.run(judge(run, args.model, args.files, args.games))
    result = {str(file): share for file, share in zip(args.files, shares, strict=True)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
