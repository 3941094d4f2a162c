"""TRL's echo script on two cores: no docker, no download, no GPU.

The rollout function is the guide's, but for its URL; the environment is a server of this checkout,
and the model is a tiny one that is made on the spot. In four epochs of 64 prompts it learns to say
the longest word of its vocabulary 32 times, which is all that can be earned.

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
    # It begins with any token as likely as any other: had it learned to say some words, it would
    # have learned where they end, too, and shun those that stand last.
    "warm_start_games": 1,
    "warm_start_epochs": 1,
}


def make_rollout_func(client):
    """The guide's rollout function."""

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
    """The trainer, when it has trained."""
    log = Path(tempfile.mkdtemp()) / "echo.log"
    with LocalServer("echo_env", {}, 16, log) as up:
        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=reward_from_env,
            train_dataset={"prompt": [PROMPT] * 64},
            rollout_func=make_rollout_func(EchoEnv(base_url=up.addresses.http)),
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
                # vLLM takes longer to start than all of this to train.
                "generator.kind=transformers",
                # Else it settles on the first long word that it comes across.
                "algorithm.entropy_coef=0.1",
                "algorithm.entropy_coef_final=0",
                f"training.shuffle_rewards={json.dumps(shuffle_rewards)}",
                f"environment.options.example_answers={json.dumps(WORDS)}",
            ],
        )
        trainer.train()
        return trainer


def reward_from_env(completions, **kwargs):
    """The rewards that the rollout function has brought along."""
    env_rewards = kwargs.get("env_reward", [])
    return [float(reward) for reward in env_rewards] if env_rewards else [0.0] * len(completions)


def main():
    """Train, and print the curve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs/trl-echo")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--shuffle-rewards", action="store_true", help="the negative control")
    given = parser.parse_args()
    trainer = train(given.seed, given.output_dir, given.port, shuffle_rewards=given.shuffle_rewards)
    for entry in trainer.state.log_history:
        sys.stdout.write(f"step {entry['step']:>3}  env_reward {entry['reward']:7.3f}\n")


if __name__ == "__main__":
    main()
