"""What rollout functions of TRL's may look like, and what is made of what they return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ludus.proto.errors import ConfigError, RolloutFunctionError
from ludus.trainer.rollout.batch.contract import Expected, Form, form_of, read_rows

TWO_BY_TWO = Expected("m:f", num_prompts=2, num_generations=2, vocab_size=100, max_tokens=6)


def returned(**changes: Any) -> dict[str, Any]:
    """What a function may well return: four rows, the prompts repeated."""
    sound = {
        "prompt_ids": [[1, 2], [1, 2], [3], [3]],
        "completion_ids": [[4], [5, 6], [7], [8, 9, 10]],
        "logprobs": [[-0.1], [-0.2, -0.3], [0.0], [-1.0, -2.0, -3.0]],
    }
    return {**sound, **changes}


def test_forms_are_told_apart_by_the_names_of_their_parameters() -> None:
    assert form_of(lambda prompts, args, processing_class: None, "f") is Form.ONCE
    assert form_of(lambda batch, processing_class, args, k=1: None, "f") is Form.ONCE
    assert (
        form_of(lambda prompts, images, args, processing_class: None, "f") is Form.ONCE_WITH_IMAGES
    )
    assert form_of(lambda prompts, trainer, **rest: None, "f") is Form.REPEATED
    assert form_of(lambda prompts, trainer=None: None, "f") is Form.REPEATED
    assert form_of(lambda prompts, args, processing_class=None: None, "f") is Form.ONCE


def test_a_function_of_no_form_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"\(prompts, trainer\), got \(prompts, tokenizer\)"):
        form_of(lambda prompts, tokenizer: None, "f")

    async def rollout(prompts: Any, trainer: Any) -> None: ...

    with pytest.raises(ConfigError, match="got a coroutine function"):
        form_of(rollout, "f")


def test_prompts_may_come_once_and_other_columns_as_arrays_or_one_value() -> None:
    rows = read_rows(
        returned(
            prompt_ids=[[1, 2], [3]],
            logprobs=[np.array([-0.1]), [[-0.2], [-0.3]], [0.0], [-1.0, -2.0, -3.0]],
            env_reward=np.arange(4),
            run="a",
        ),
        TWO_BY_TWO,
    )
    assert [row.prompt_ids for row in rows] == [[1, 2], [1, 2], [3], [3]]
    assert [row.logprobs for row in rows][:2] == [[-0.1], [-0.2, -0.3]]
    assert [dict(row.fields) for row in rows] == [{"env_reward": n, "run": "a"} for n in range(4)]
    assert all(row.is_sampled == [True] * len(row.completion_ids) for row in rows)


def test_a_mask_parts_what_was_sampled_from_what_was_said() -> None:
    rows = read_rows(returned(env_mask=[[1], [0, 1], [1], [1, 0, 1]]), TWO_BY_TWO)
    assert [list(row.sampled_spans) for row in rows] == [
        [(0, 1)],
        [(1, 2)],
        [(0, 1)],
        [(0, 1), (2, 3)],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, r"expected the keys .* without \['logprobs'\]"),
        ({"prompt_ids": [[1]]}, "expected 4 entries of 'prompt_ids'.* got 1"),
        (
            {"num_turns": [1, 2, 3, 4], "seed": 0},
            r"expected other keys than \['num_turns', 'seed'\].* rename them",
        ),
        ({"env_reward": iter([1.0] * 4)}, "expected 'env_reward' to be a list, got <list_iterator"),
        ({"env_reward": [1.0, 2.0]}, "expected 4 entries of 'env_reward'.* got 2"),
        ({"completion_ids": 3}, "expected 'completion_ids' to be a list, got 3"),
        (
            {"completion_ids": [[4], [5, 6], [], [8, 9, 10]]},
            r"row 2 \(prompt 1, completion 0\): expected a list of 'completion_ids', got \[\]",
        ),
        (
            {"completion_ids": [[4], [5, 100], [7], [8, 9, 10]]},
            "row 1 .*'completion_ids' below 100.* got 100 at place 1",
        ),
        (
            {"prompt_ids": [[1, 2], [1, 2], [3.5], [3]]},
            "row 2 .*'prompt_ids' below 100.* got 3.5 at place 0",
        ),
        (
            {"logprobs": [[-0.1], [-0.2], [0.0], [-1.0, -2.0, -3.0]]},
            "row 1 .*expected 2 logprobs, one per completion id, got 1",
        ),
        (
            {"logprobs": [[-0.1], [-0.2, 0.3], [0.0], [-1.0, -2.0, -3.0]]},
            "row 1 .*log-prob of 0 or below for each token, got 0.3 at place 1",
        ),
        (
            {"logprobs": [[-0.1], [-0.2, -0.3], [float("nan")], [-1.0, -2.0, -3.0]]},
            "row 2 .*log-prob of 0 or below.* got nan",
        ),
        (
            {"prompt_ids": [[1, 2], [1, 2], [3], [3, 3, 3, 3]]},
            "row 3 .*rollout.max_tokens = 6 .* got 4 and 3",
        ),
        (
            {"env_mask": [[1], [1], [1], [1, 1, 1]]},
            "row 1 .*'env_mask' to be 2 times 1",
        ),
        (
            {"env_mask": [[1], [1, 1], [0], [1, 1, 1]]},
            "row 2 .*an 'env_mask' of zeros alone",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_named_with_its_row(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RolloutFunctionError, match=f"rollout function 'm:f' .*{message}"):
        read_rows(returned(**changes), TWO_BY_TWO)


def test_what_is_no_dictionary_is_refused() -> None:
    with pytest.raises(RolloutFunctionError, match="expected to return a dictionary, got None"):
        read_rows(None, TWO_BY_TWO)
