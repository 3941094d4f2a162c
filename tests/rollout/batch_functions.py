"""Rollout functions of TRL's forms, and rewards, that tests name in configurations."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

from ludus.trainer.compat.trl import generate_rollout_completions

Returned = dict[str, Any]

THREADS: set[int] = set()
IS_INSIDE = threading.Semaphore(1)
SEEN: list[Any] = []
"""What functions of this module were called with."""


def once(prompts: list[str], args: Any, processing_class: Any) -> Returned:
    """As the first form of TRL's has it: asks the server, and decodes."""
    THREADS.add(threading.get_ident())
    assert IS_INSIDE.acquire(blocking=False), "calls come one after the other"
    SEEN.append((prompts, args))
    payload = {
        "prompts": prompts,
        "n": args.num_generations,
        "temperature": args.temperature,
        "max_tokens": args.max_completion_length,
    }
    time.sleep(0.01)
    url = f"http://{args.vllm_server_host}:{args.vllm_server_port}/generate/"
    result = httpx.post(url, json=payload, timeout=60).json()
    texts = processing_class.batch_decode(result["completion_ids"], skip_special_tokens=True)
    result["length"] = [float(len(text)) for text in texts]
    IS_INSIDE.release()
    return result


def once_with_images(prompts: list[str], images: Any, args: Any, processing_class: Any) -> Returned:
    """The form between: no images come."""
    assert images is None
    return once(prompts, args, processing_class)


def repeated(prompts: list[str], trainer: Any) -> Returned:
    """The newest form."""
    SEEN.append((prompts, trainer))
    outputs = generate_rollout_completions(trainer, prompts)
    columns = {key: [one[key] for one in outputs] for key in outputs[0]}
    return {**columns, "length": [float(len(one["text"])) for one in outputs]}


def two_answers(prompts: list[str], trainer: Any) -> Returned:
    """Two answers per episode, with a token of the environment's between them."""
    first = generate_rollout_completions(trainer, prompts, generation_overrides={"max_tokens": 2})
    said = [[*one["prompt_ids"], *one["completion_ids"], 7] for one in first]
    second = generate_rollout_completions(trainer, said, generation_overrides={"max_tokens": 2})
    pairs = list(zip(first, second, strict=True))
    return {
        "prompt_ids": [a["prompt_ids"] for a, _ in pairs],
        "completion_ids": [[*a["completion_ids"], 7, *b["completion_ids"]] for a, b in pairs],
        "logprobs": [[*a["logprobs"], 0.0, *b["logprobs"]] for a, b in pairs],
        "env_mask": [
            [1] * len(a["completion_ids"]) + [0] + [1] * len(b["completion_ids"]) for a, b in pairs
        ],
        "length": 3.0,
    }


def without_logprobs(prompts: list[str], trainer: Any) -> Returned:
    """Lacks a key."""
    outputs = generate_rollout_completions(trainer, prompts)
    return {key: [one[key] for one in outputs] for key in ("prompt_ids", "completion_ids")}


def invented_logprobs(prompts: list[str], trainer: Any) -> Returned:
    """Says of one row that it was likelier than it was."""
    returned = repeated(prompts, trainer)
    returned["logprobs"][3] = [*returned["logprobs"][3][:-1], -1e-3]
    return returned


def other_tokens(prompts: list[str], trainer: Any) -> Returned:
    """Puts another token before the first row's last one, with the log-probs as they were."""
    returned = repeated(prompts, trainer)
    ids = returned["completion_ids"][0]
    returned["completion_ids"][0] = [*ids[:-2], (ids[-2] + 1) % 250, ids[-1]]
    return returned


def at_another_temperature(prompts: list[str], trainer: Any) -> Returned:
    """Samples otherwise than the run trains on."""
    outputs = generate_rollout_completions(
        trainer, prompts, generation_overrides={"temperature": 0.5}
    )
    return {key: [one[key] for one in outputs] for key in outputs[0]}


def exits(prompts: list[str], args: Any, processing_class: Any) -> Returned:
    """Ends the program, as it believes."""
    raise SystemExit(3)


def raises(prompts: list[str], args: Any, processing_class: Any) -> Returned:
    """Fails."""
    raise ZeroDivisionError("no luck")


def asks_for_the_model(prompts: list[str], trainer: Any) -> Returned:
    """Wants what lives elsewhere."""
    return trainer.model(prompts)


def takes_too_long(prompts: list[str], trainer: Any) -> Returned:
    """Outlives its time."""
    time.sleep(0.5)
    return repeated(prompts, trainer)


def by_length(completions: Any, length: list[float], **columns: Any) -> list[float]:
    """The function's own column."""
    SEEN.append({"completions": completions, **columns})
    return length
