"""Gymformer's script in which a language model learns to solve problems by chain of thought.

    python examples/gymformer/cot.py
    python examples/gymformer/cot.py --model Qwen/Qwen2-0.5B-Instruct

Without --model, the script makes a tiny model that initially guesses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tiny_models import make_thinker

import ludus.trainer.compat.gymformer.env  # noqa: F401 - registers CoTEnv-v0
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from ludus.trainer.compat.gymformer.trainer.trainer import train_agent
from ludus.trainer.models.load import load_tokenizer


def main() -> None:
    """Train and print the mean rewards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hugging Face id or folder")
    parser.add_argument("--episodes", type=int, default=10_000)
    args = parser.parse_args()
    model_name = args.model or make_thinker(Path("runs/gymformer/thinker"))
    tokenizer = load_tokenizer(model_name)
    pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    rewards = train_agent(
        env_name="CoTEnv-v0",
        actor=LMActorNetwork(model_name=model_name, pad_token_id=pad_token_id),
        critic=LMCriticNetwork(model_name=model_name, pad_token_id=pad_token_id),
        ppo_config=PPOConfig(
            lr_actor=1e-3, gamma=1.0, gae_lambda=1.0, minibatch_size=64, entropy_coef=0.0
        ),
        max_episodes=args.episodes,
        max_timesteps=64,
        update_interval=256,
        save_path="runs/gymformer",
    )
    count = max(1, len(rewards) // 10)
    means = [sum(part) / count for part in (rewards[:count], rewards[-count:])]
    sys.stdout.write(f"mean reward of the first tenth {means[0]:.2f}, of the last {means[1]:.2f}\n")


if __name__ == "__main__":
    main()
