"""Gymformer's script in which small networks learn to balance a pole, with the same settings.

python examples/gymformer/cartpole.py
"""

from __future__ import annotations

import argparse
import sys

import gymnasium as gym

from ludus.trainer.compat.gymformer.rl.common_nn import MLPActorNetwork, MLPCriticNetwork
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig
from ludus.trainer.compat.gymformer.trainer.trainer import train_agent


def main() -> None:
    """Train and print the mean returns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    env_name = "CartPole-v1"
    env = gym.make(env_name)
    rewards = train_agent(
        env_name=env_name,
        actor=MLPActorNetwork(env.observation_space.shape[0], 64, env.action_space.n),
        critic=MLPCriticNetwork(env.observation_space.shape[0], 64),
        ppo_config=PPOConfig(),
        max_episodes=args.episodes,
        save_path="runs/gymformer",
        seed=args.seed,
    )
    count = max(1, len(rewards) // 10)
    means = [sum(part) / count for part in (rewards[:count], rewards[-count:])]
    sys.stdout.write(f"mean return of the first tenth {means[0]:.1f}, of the last {means[1]:.1f}\n")


if __name__ == "__main__":
    main()
