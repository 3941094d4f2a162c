"""A TRL script that trains for one epoch, with its imports changed to Ludus.

The arguments are a folder and the form of the rollout function: `http` or `call`. Other processes
cannot import the functions of a script. The reward function appends the number of each row to a
file, and the script prints the result of `train` as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import requests

from ludus.proto.runs import read_transcripts
from ludus.trainer.compat.trl import GRPOConfig, GRPOTrainer, generate_rollout_completions

NUM_ROWS = 16
REWARDED_ROWS_FILE = "rewarded.txt"


def complete_over_http(prompts: list[str], args: Any, processing_class: Any) -> dict[str, Any]:
    """Complete the prompts over HTTP, as TRL scripts from late 2025 do."""
    payload = {
        "prompts": prompts,
        "n": args.num_generations,
        "max_tokens": args.max_completion_length,
    }
    result = requests.post(f"{args.vllm_server_base_url}/generate/", json=payload).json()
    return {**result, "env_reward": list(map(rate_tokens, result["completion_ids"]))}


def complete_by_call(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Complete the prompts with a function call, as newer TRL scripts do."""
    outputs = generate_rollout_completions(trainer, prompts)
    columns = {
        key: [output[key] for output in outputs]
        for key in ("prompt_ids", "completion_ids", "logprobs")
    }
    return {**columns, "env_reward": list(map(rate_tokens, columns["completion_ids"]))}


def rate_tokens(token_ids: list[int]) -> float:
    """Return the share of different tokens.

    The text of a completion would not do: it contains special tokens that a template uses as
    content, which a tokenizer that skips special tokens drops.
    """
    return len(set(token_ids)) / len(token_ids)


def reward_from_env(
    completions: list[str], env_reward: list[float], number: list[int], folder: list[str], **_: Any
) -> list[float]:
    """Append the row numbers to a file, and return the rewards of the rollout function."""
    assert all(isinstance(completion, str) for completion in completions)
    with (Path(folder[0]) / REWARDED_ROWS_FILE).open("a", encoding="utf-8") as file:
        file.writelines(f"{row_number}\n" for row_number in number)
    return env_reward


def main(folder: str, form: str) -> None:
    """Train and print the result as JSON."""
    rows = [{"prompt": f"word {i}", "number": i, "folder": folder} for i in range(NUM_ROWS)]
    trainer = GRPOTrainer(
        model={"kind": "tiny", "width": 64, "num_heads": 2, "max_tokens": 64},
        reward_funcs=reward_from_env,
        train_dataset=rows,
        rollout_func={"http": complete_over_http, "call": complete_by_call}[form],
        args=GRPOConfig(
            f"{folder}/run",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_port=0,
            num_train_epochs=1,
            num_generations=4,
            per_device_train_batch_size=16,
            max_completion_length=8,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            seed=3,
        ),
        overrides=[
            "generator.kind=transformers",
            "model.warm_start_games=64",
            "eval.num_games=3",
            'environment.options.example_answers=["a", "word"]',
        ],
    )
    result = trainer.train()
    history = trainer.state.log_history
    texts = [transcript.turns[0].answer for transcript in read_transcripts(Path(folder) / "run")]
    output = {
        "global_step": result.global_step,
        "rewards": [entry["reward"] for entry in history],
        "epoch": history[-1]["epoch"],
        "answers": len(texts),
        "model": (trainer.save_model(f"{folder}/model") / "config.json").is_file(),
    }
    sys.stdout.write(json.dumps(output) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
