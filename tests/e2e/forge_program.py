"""A program that trains by Forge's calls: argv are a folder and a server's address.

What it saw is printed as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge import GRPOTrainer, setup_forge_training

EXAMPLE = Path(__file__).parents[2] / "examples" / "tutorial" / "blackjack.yaml"
SHORT = (
    "local_batch_size=64",
    "rollout_threads=32",
    "off_by_n=0",
    "trainer.training.steps=6",
    "trainer.checkpoint.interval=6",
    "ludus.model.warm_start_games=256",
    "ludus.learner.num_minibatches=2",
    "ludus.algorithm.correction.kind=off",
    "ludus.eval.num_games=100",
)
ALWAYS_STAND = (
    *SHORT,
    "local_batch_size=2048",
    "rollout_threads=512",
    "ludus.rollout.group_seed=independent",
    "trainer.training.steps=2",
    "trainer.optimizer.lr=1e-9",
)
STAND = 1
SEEN: dict[str, Any] = {}


def evaluate_response(prompt: str, response: str, game_reward: float) -> float:
    """The tutorial's reward: a draw is worth something, and is no win for that."""
    return {1.0: 2.0, 0.0: 0.5}.get(game_reward, -1.0)


async def compute(group: list[Any]) -> list[float]:
    """Advantages against the mean, by a function of the program's own."""
    rewards = torch.tensor([episode.reward for episode in group])
    return (rewards - rewards.mean()).tolist()


def show(observation: dict[str, Any], first: bool) -> list[dict[str, str]]:
    """One text whatever the cards are."""
    return [{"role": "user", "content": "hard 16 vs 10"}]


def stand(text: str, observation: dict[str, Any]) -> dict[str, Any]:
    """The same action whatever is said."""
    return {"action_id": STAND}


async def begin(folder: str, address: str, name: str, *overrides: str, **own: Any) -> GRPOTrainer:
    """A trainer of the example's, in the folder."""
    place = (f"ludus.name={name}", f"ludus.output_dir={json.dumps(folder)}")
    address = f"blackjack_env.server_url={json.dumps(address)}"
    return await setup_forge_training(EXAMPLE, [*place, address, *overrides], **own)


async def in_parts(folder: str, address: str) -> None:
    """Three steps and three more, each call in a task of its own, as the cells of a notebook."""
    own = {"reward": evaluate_response, "compute_advantages": compute}
    trainer = await asyncio.create_task(begin(folder, address, "parts", *SHORT, **own))
    results = [await asyncio.create_task(trainer.run(steps=3))]
    completions = await trainer.policy.generate("hard 20 vs 6", sampling_params={"n": 3})
    SEEN["versions"] = [one.generator_version for one in completions]
    SEEN["texts"] = [one.text for one in completions]
    SEEN["tokens"] = [[len(one.token_ids), len(one.logprobs)] for one in completions]
    again = await trainer.policy.generate.route(completions[0].prompt, sampling_params={"n": 3})
    SEEN["the same by its prompt"] = [one.text for one in again] == SEEN["texts"]
    results.append(await asyncio.create_task(trainer.run(steps=3)))
    SEEN["results"] = results
    SEEN["summary"] = trainer.summary is not None and trainer.summary.finished
    try:
        await trainer.run(steps=1)
    except ConfigError as error:
        SEEN["refused"] = str(error)
    await asyncio.create_task(trainer.shutdown())


async def at_once(folder: str, address: str) -> None:
    """The same six steps by one call."""
    own = {"reward": evaluate_response, "compute_advantages": compute}
    async with await begin(folder, address, "whole", *SHORT, **own) as trainer:
        SEEN["whole"] = await trainer.run()


async def always_stand(folder: str, address: str) -> None:
    """Games in which every answer is to stand, paid as the tutorial pays."""
    own = {"reward": evaluate_response, "render": show, "parse": stand}
    async with await begin(folder, address, "stand", *ALWAYS_STAND, **own) as trainer:
        SEEN["stand"] = await trainer.run()


def main(folder: str, address: str) -> None:
    """Train three times, and print what was seen."""
    for train in (in_parts, at_once, always_stand):
        asyncio.run(train(folder, address))
    weights = [
        load_file(Path(folder) / name / "checkpoints/step-00000006/model/model.safetensors")
        for name in ("parts", "whole")
    ]
    SEEN["apart"] = max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0])
    sys.stdout.write("\n" + json.dumps(SEEN) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
