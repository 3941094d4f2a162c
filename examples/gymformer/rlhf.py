"""Gymformer's scripts in which a language model learns from preferences.

    python examples/gymformer/rlhf.py

A reward model is trained on comparisons by a hidden rule, then a policy on the reward model's
scores. By default, all models are tiny and made by this script. Use `--model`, `--preferences` and
`--prompts` for other models and data.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gymnasium
from tiny_models import make_speaker

import ludus.trainer.compat.gymformer.env  # noqa: F401 - registers RLHFEnv-v0
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from ludus.trainer.compat.gymformer.trainer import train_reward
from ludus.trainer.compat.gymformer.trainer.trainer import train_agent
from ludus.trainer.models.load import load_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "reward_model"))
from make_preferences import TOPICS, WORDS, make_comparisons, write_model

FOLDER = Path("runs/gymformer")
PROMPTS = [f"Tell me about {topic}." for topic in TOPICS]


def main() -> None:
    """Train a reward model and a policy, and print the mean scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hugging Face id or folder of both models")
    parser.add_argument("--preferences", help="file of comparisons")
    parser.add_argument("--prompts", help="file with a column named prompt")
    parser.add_argument("--episodes", type=int, default=10_000)
    args = parser.parse_args()
    train_reward(
        model_name=args.model or make_judge(),
        datasets_path=args.preferences or write_preferences(),
        reward_model_path="models/reward_model",
        batch_size=32,
        epochs=18,
        warmup_steps=30,
        weight_decay=0.1,
        learning_rate=1e-5 if args.model else 3e-3,
    )
    model_name = args.model or make_speaker(FOLDER / "speaker", PROMPTS, [*WORDS, *TOPICS])
    gymnasium.register(
        id="Pleasing-v0",
        entry_point="ludus.trainer.compat.gymformer.env.rlhf_env:RLHFEnv",
        kwargs={
            "reward_model": str(Path("models/reward_model").absolute()),
            "dataset": args.prompts or PROMPTS,
            "kl_coef": 0.1,
            "max_generation": 64 if args.model else 12,
        },
    )
    tokenizer = load_tokenizer(model_name)
    rewards = train_agent(
        env_name="Pleasing-v0",
        actor=LMActorNetwork(model_name=model_name, pad_token_id=tokenizer.eos_token_id),
        critic=LMCriticNetwork(model_name=model_name, pad_token_id=tokenizer.eos_token_id),
        ppo_config=PPOConfig(
            lr_actor=1e-5 if args.model else 1e-3, gamma=1.0, gae_lambda=1.0, minibatch_size=64
        ),
        max_episodes=args.episodes,
        max_timesteps=100,
        update_interval=256,
        save_path=str(FOLDER),
    )
    count = max(1, len(rewards) // 10)
    means = [sum(part) / count for part in (rewards[:count], rewards[-count:])]
    sys.stdout.write(f"mean score of the first tenth {means[0]:.2f}, of the last {means[1]:.2f}\n")


def make_judge() -> str:
    """Make the tiny language model of the reward model and return its folder."""
    write_model(FOLDER / "judge", seed=0)
    return str(FOLDER / "judge")


def write_preferences() -> str:
    """Write 2,000 comparisons by the hidden rule and return the file."""
    path = FOLDER / "preferences.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(row) + "\n" for row in make_comparisons(2000, seed=0))
    path.write_text("".join(rows), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    main()
