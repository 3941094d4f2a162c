"""Program that trains with Forge's API and prints its results as JSON.

Arguments: folder, address of the environment server.
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
SHORT_RUN = (
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
STAND_RUN = (
    *SHORT_RUN,
    "local_batch_size=512",
    "rollout_threads=256",
    "ludus.rollout.group_seed=independent",
    "trainer.training.steps=2",
    "trainer.optimizer.lr=1e-9",
)
STAND_ACTION_ID = 1
OUTPUT: dict[str, Any] = {}


def evaluate_response(prompt: str, response: str, game_reward: float) -> float:
    """Return the tutorial's reward. A draw has a positive reward but is not a win."""
    return {1.0: 2.0, 0.0: 0.5}.get(game_reward, -1.0)


async def compute_advantages(group: list[Any]) -> list[float]:
    """Return the rewards of a group minus their mean."""
    rewards = torch.tensor([episode.reward for episode in group])
    return (rewards - rewards.mean()).tolist()


def render_hand(observation: dict[str, Any], first: bool) -> list[dict[str, str]]:
    """Return the same messages for any cards."""
    return [{"role": "user", "content": "hard 16 vs 10"}]


def parse_stand(text: str, observation: dict[str, Any]) -> dict[str, Any]:
    """Return the same action for any text."""
    return {"action_id": STAND_ACTION_ID}


async def make_trainer(
    folder: str, address: str, name: str, *overrides: str, **functions: Any
) -> GRPOTrainer:
    """Return a trainer of the example that writes to the folder."""
    run_settings = (
        f"ludus.name={name}",
        f"ludus.output_dir={json.dumps(folder)}",
        f"blackjack_env.server_url={json.dumps(address)}",
    )
    return await setup_forge_training(EXAMPLE, [*run_settings, *overrides], **functions)


async def train_in_parts(folder: str, address: str) -> None:
    """Train three steps twice, with each call in a separate task, like notebook cells."""
    functions = {"reward": evaluate_response, "compute_advantages": compute_advantages}
    trainer = await asyncio.create_task(
        make_trainer(folder, address, "parts", *SHORT_RUN, **functions)
    )
    results = [await asyncio.create_task(trainer.run(steps=3))]
    completions = await trainer.policy.generate("hard 20 vs 6", sampling_params={"n": 3})
    OUTPUT["versions"] = [completion.generator_version for completion in completions]
    OUTPUT["texts"] = [completion.text for completion in completions]
    OUTPUT["tokens"] = [
        [len(completion.token_ids), len(completion.logprobs)] for completion in completions
    ]
    prompt = completions[0].prompt
    repeated_completions = await trainer.policy.generate.route(prompt, sampling_params={"n": 3})
    OUTPUT["repeated_texts"] = [completion.text for completion in repeated_completions]
    results.append(await asyncio.create_task(trainer.run(steps=3)))
    OUTPUT["results"] = results
    OUTPUT["summary"] = trainer.summary is not None and trainer.summary.finished
    try:
        await trainer.run(steps=1)
    except ConfigError as error:
        OUTPUT["refused"] = str(error)
    await asyncio.create_task(trainer.shutdown())


async def train_in_one_call(folder: str, address: str) -> None:
    """Train the same six steps in one call."""
    functions = {"reward": evaluate_response, "compute_advantages": compute_advantages}
    async with await make_trainer(folder, address, "whole", *SHORT_RUN, **functions) as trainer:
        OUTPUT["whole"] = await trainer.run()


async def train_always_stand(folder: str, address: str) -> None:
    """Train on games in which every action is to stand, with the tutorial's rewards."""
    functions = {"reward": evaluate_response, "render": render_hand, "parse": parse_stand}
    async with await make_trainer(folder, address, "stand", *STAND_RUN, **functions) as trainer:
        OUTPUT["stand"] = await trainer.run()


def main(folder: str, address: str) -> None:
    """Train three times, then print the output."""
    for train in (train_in_parts, train_in_one_call, train_always_stand):
        asyncio.run(train(folder, address))
    weights = [
        load_file(Path(folder) / name / "checkpoints/step-00000006/model/model.safetensors")
        for name in ("parts", "whole")
    ]
    OUTPUT["max_weight_difference"] = max(
        float((weights[0][key] - weights[1][key]).abs().max()) for key in weights[0]
    )
    sys.stdout.write("\n" + json.dumps(OUTPUT) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
