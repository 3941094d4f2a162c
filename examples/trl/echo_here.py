"""TRL's echo script on two cores, without docker, download or GPU.

The rollout function differs from the guide's only in its URL. The environment is a server of this
repository, and the model is a new tiny model. In four epochs of 64 prompts, the model learns to
repeat the longest word of its vocabulary 32 times, which has the highest possible reward.

    python examples/trl/echo_here.py [--seed 0] [--shuffle-rewards]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import requests

from echo_env import EchoAction, EchoEnv
from ludus.env.serving.subprocess import LocalServer
from ludus.trainer.compat.trl import GRPOConfig, GRPOTrainer

PROMPT = "You are an AI that interacts with an *Echo* environment. Word to echo:"
WORDS = ["echo", "a word to echo", "interacts with an environment"]
MODEL = {
    "kind": "tiny",
    "width": 64,
    "num_heads": 2,
    "max_tokens": 128,
    # Initially, all tokens are about equally likely. A longer warm start would also teach the ends
    # of words and make last tokens less likely.
    "warm_start_games": 1,
    "warm_start_epochs": 1,
}


def make_rollout_func(client):
    """Return the guide's rollout function."""

    def rollout_func(prompts, args, processing_class):
        payload = {
            "prompts": prompts,
            "n": args.num_generations,
            "temperature": args.temperature,
            "max_tokens": args.max_completion_length,
        }
        response = requests.post(f"http://0.0.0.0:{args.vllm_server_port}/generate/", json=payload)
        result = response.json()

        completions_text = processing_class.batch_decode(
            result["completion_ids"], skip_special_tokens=True
        )

        client.reset()
        env_rewards = []
        for msg in completions_text:
            env_result = client.step(EchoAction(message=msg))
            env_rewards.append(env_result.reward)

        result["env_reward"] = env_rewards
        return result

    return rollout_func


def train(seed, output_dir, port, *, shuffle_rewards=False):
    """Train and return the trainer."""
    log = Path(tempfile.mkdtemp()) / "echo.log"
    with LocalServer("echo_env", {}, 16, log) as server:
        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=reward_from_env,
            train_dataset={"prompt": [PROMPT] * 64},
            rollout_func=make_rollout_func(EchoEnv(base_url=server.addresses.http)),
            args=GRPOConfig(
                output_dir,
                vllm_mode="server",
                vllm_server_port=port,
                use_vllm=True,
                num_train_epochs=4,
                num_generations=32,
                max_completion_length=32,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=4,
                learning_rate=2e-3,
                lr_scheduler_type="constant",
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                seed=seed,
            ),
            overrides=[
                # vLLM takes longer to start than the whole training.
                "generator.kind=transformers",
                # Without an entropy bonus, the policy repeats the first long word that it samples.
                "algorithm.entropy_coef=0.1",
                "algorithm.entropy_coef_final=0",
                f"training.shuffle_rewards={json.dumps(shuffle_rewards)}",
                f"environment.options.example_answers={json.dumps(WORDS)}",
            ],
        )
        trainer.train()
        return trainer


def reward_from_env(completions, **kwargs):
    """Return the rewards from the rollout function."""
    env_rewards = kwargs.get("env_reward", [])
    return [float(reward) for reward in env_rewards] if env_rewards else [0.0] * len(completions)


def main():
    """Train and print the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs/trl-echo")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--shuffle-rewards", action="store_true", help="shuffle rewards, as a negative control"
    )
    args = parser.parse_args()
    trainer = train(args.seed, args.output_dir, args.port, shuffle_rewards=args.shuffle_rewards)
    for entry in trainer.state.log_history:
        sys.stdout.write(f"step {entry['step']:>3}  env_reward {entry['reward']:7.3f}\n")


if __name__ == "__main__":
    main()
