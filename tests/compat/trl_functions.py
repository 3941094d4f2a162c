"""Rollout functions with TRL's signatures and a reward function, for test configurations."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, ClassVar

import httpx

from ludus.trainer.compat.trl import generate_rollout_completions
from ludus.trainer.compat.trl.tools import ToolRollout

Columns = dict[str, Any]

CALL_LOCK = threading.Semaphore(1)
CALLS: list[Any] = []
"""Arguments of each call of a function in this module."""


def complete_over_http(prompts: list[str], args: Any, processing_class: Any) -> Columns:
    """Request completions from the server, with TRL's oldest signature."""
    assert CALL_LOCK.acquire(blocking=False), "two calls ran at the same time"
    CALLS.append((prompts, args))
    payload = {
        "prompts": prompts,
        "n": args.num_generations,
        "temperature": args.temperature,
        "max_tokens": args.max_completion_length,
    }
    time.sleep(0.01)
    url = f"http://{args.vllm_server_host}:{args.vllm_server_port}/generate/"
    columns = httpx.post(url, json=payload, timeout=60).json()
    texts = processing_class.batch_decode(columns["completion_ids"], skip_special_tokens=True)
    columns["length"] = [float(len(text)) for text in texts]
    CALL_LOCK.release()
    return columns


def complete_over_http_with_images(
    prompts: list[str], images: Any, args: Any, processing_class: Any
) -> Columns:
    """Request completions with TRL's second signature; `images` must be None."""
    assert images is None
    return complete_over_http(prompts, args, processing_class)


def complete_by_call(prompts: list[str], trainer: Any) -> Columns:
    """Sample one completion for each prompt, with TRL's newest signature."""
    CALLS.append((prompts, trainer))
    outputs = generate_rollout_completions(trainer, prompts)
    columns = {key: [output[key] for output in outputs] for key in outputs[0]}
    return {**columns, "length": [float(len(output["text"])) for output in outputs]}


def sample_two_completions(prompts: list[str], trainer: Any) -> Columns:
    """Sample two completions for each episode, with one environment token between them."""
    overrides = {"max_tokens": 2}
    first_outputs = generate_rollout_completions(trainer, prompts, generation_overrides=overrides)
    contexts = [[*output["prompt_ids"], *output["completion_ids"], 7] for output in first_outputs]
    second_outputs = generate_rollout_completions(trainer, contexts, generation_overrides=overrides)
    pairs = list(zip(first_outputs, second_outputs, strict=True))
    return {
        "prompt_ids": [a["prompt_ids"] for a, _ in pairs],
        "completion_ids": [[*a["completion_ids"], 7, *b["completion_ids"]] for a, b in pairs],
        "logprobs": [[*a["logprobs"], 0.0, *b["logprobs"]] for a, b in pairs],
        "env_mask": [
            [1] * len(a["completion_ids"]) + [0] + [1] * len(b["completion_ids"]) for a, b in pairs
        ],
        "length": 3.0,
    }


def omit_logprobs(prompts: list[str], trainer: Any) -> Columns:
    """Sample one completion for each prompt and return columns without log-probs."""
    outputs = generate_rollout_completions(trainer, prompts)
    return {key: [output[key] for output in outputs] for key in ("prompt_ids", "completion_ids")}


def invent_logprobs(prompts: list[str], trainer: Any) -> Columns:
    """Sample completions and replace the last log-prob of one row."""
    columns = complete_by_call(prompts, trainer)
    columns["logprobs"][3] = [*columns["logprobs"][3][:-1], -1e-3]
    return columns


def change_tokens(prompts: list[str], trainer: Any) -> Columns:
    """Sample completions and replace one token of the first row, but not its log-prob."""
    columns = complete_by_call(prompts, trainer)
    ids = columns["completion_ids"][0]
    columns["completion_ids"][0] = [*ids[:-2], (ids[-2] + 1) % 250, ids[-1]]
    return columns


def change_temperature(prompts: list[str], trainer: Any) -> Columns:
    """Sample at a temperature different from the run's."""
    outputs = generate_rollout_completions(
        trainer, prompts, generation_overrides={"temperature": 0.5}
    )
    return {key: [output[key] for output in outputs] for key in outputs[0]}


def exit_process(prompts: list[str], args: Any, processing_class: Any) -> Columns:
    raise SystemExit(3)


def raise_error(prompts: list[str], args: Any, processing_class: Any) -> Columns:
    raise ZeroDivisionError("division failed")


def read_model(prompts: list[str], trainer: Any) -> Columns:
    """Read an attribute that the trainer does not have."""
    return trainer.model(prompts)


def respond_slowly(prompts: list[str], trainer: Any) -> Columns:
    """Sleep past the time limit, then sample completions."""
    time.sleep(0.5)
    return complete_by_call(prompts, trainer)


def compute_length_reward(completions: Any, length: list[float], **columns: Any) -> list[float]:
    """Return the `length` column of the rollout function as rewards."""
    CALLS.append({"completions": completions, **columns})
    return length


class NumberedEpisode:
    """An environment that knows how many episodes started before its episode."""

    instances: ClassVar[list[NumberedEpisode]] = []
    counter = itertools.count()
    has_second_call = threading.Event()
    """Event that is set when an episode of a second call starts."""

    def __init__(self) -> None:
        self.instances.append(self)

    def reset(self, **columns: Any) -> None:
        """Number the episode."""
        self.number = next(self.counter)
        if self.number >= 8:
            self.has_second_call.set()

    def look(self) -> str:
        """Look around."""
        return "nothing"


play_numbered_episodes = ToolRollout([], {None: NumberedEpisode}, 0)


def check_numbers(environments: list[NumberedEpisode], **_: Any) -> list[float]:
    """Return 1 for each environment that is not reset while its reward is computed."""
    numbers = [environment.number for environment in environments]
    NumberedEpisode.has_second_call.wait(20)
    return [
        float(environment.number == number)
        for environment, number in zip(environments, numbers, strict=True)
    ]
