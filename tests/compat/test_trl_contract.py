"""Signatures of TRL's rollout functions, and checks of the rows that they return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ludus.proto.errors import ConfigError, RolloutFunctionError
from ludus.trainer.compat.trl.rollout.contract import (
    RolloutSignature,
    RowRules,
    find_signature,
    read_rows,
)

ROW_RULES = RowRules("m:f", num_prompts=2, num_generations=2, vocab_size=100, max_tokens=6)


def make_columns(**changes: Any) -> dict[str, Any]:
    """Return the columns of four valid rows for two prompts, updated with `changes`."""
    columns = {
        "prompt_ids": [[1, 2], [1, 2], [3], [3]],
        "completion_ids": [[4], [5, 6], [7], [8, 9, 10]],
        "logprobs": [[-0.1], [-0.2, -0.3], [0.0], [-1.0, -2.0, -3.0]],
    }
    return {**columns, **changes}


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (lambda prompts, args, processing_class: None, RolloutSignature.ONCE),
        (lambda batch, processing_class, args, k=1: None, RolloutSignature.ONCE),
        (lambda prompts, args, processing_class=None: None, RolloutSignature.ONCE),
        (
            lambda prompts, images, args, processing_class: None,
            RolloutSignature.ONCE_WITH_IMAGES,
        ),
        (lambda prompts, trainer, **kwargs: None, RolloutSignature.REPEATED),
        (lambda prompts, trainer=None: None, RolloutSignature.REPEATED),
    ],
)
def test_signature_is_found_by_parameter_names(function: Any, signature: RolloutSignature) -> None:
    assert find_signature(function, "f") is signature


def test_unknown_signature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\), but it has \(prompts, tokenizer\)"):
        find_signature(lambda prompts, tokenizer: None, "f")

    async def rollout(prompts: Any, trainer: Any) -> None: ...

    with pytest.raises(ConfigError, match="is a coroutine function"):
        find_signature(rollout, "f")


def test_prompts_may_be_unrepeated_and_columns_may_be_arrays_or_scalars() -> None:
    rows = read_rows(
        make_columns(
            prompt_ids=[[1, 2], [3]],
            logprobs=[np.array([-0.1]), [[-0.2], [-0.3]], [0.0], [-1.0, -2.0, -3.0]],
            env_reward=np.arange(4),
            run="a",
        ),
        ROW_RULES,
    )
    assert [row.prompt_ids for row in rows] == [[1, 2], [1, 2], [3], [3]]
    assert [row.logprobs for row in rows][:2] == [[-0.1], [-0.2, -0.3]]
    assert [dict(row.fields) for row in rows] == [{"env_reward": n, "run": "a"} for n in range(4)]
    assert all(row.is_sampled == [True] * len(row.completion_ids) for row in rows)


def test_mask_separates_sampled_tokens() -> None:
    rows = read_rows(make_columns(env_mask=[[1], [0, 1], [1], [1, 0, 1]]), ROW_RULES)
    assert [list(row.sampled_spans) for row in rows] == [
        [(0, 1)],
        [(1, 2)],
        [(0, 1)],
        [(0, 1), (2, 3)],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, r"must return the keys .* without \['logprobs'\]"),
        ({"prompt_ids": [[1]]}, "must return 4 entries of 'prompt_ids'.* returned 1"),
        (
            {"num_turns": [1, 2, 3, 4], "seed": 0},
            r"must not return the keys \['num_turns', 'seed'\].* rename them",
        ),
        (
            {"env_reward": iter([1.0] * 4)},
            "must return 'env_reward' as a list, but it returned <list_iterator",
        ),
        ({"env_reward": [1.0, 2.0]}, "must return 4 entries of 'env_reward'.* returned 2"),
        ({"completion_ids": 3}, "must return 'completion_ids' as a list, but it returned 3"),
        (
            {"completion_ids": [[4], [5, 6], [], [8, 9, 10]]},
            r"row 2 \(prompt 1, completion 0\): expected a list of 'completion_ids', got \[\]",
        ),
        (
            {"completion_ids": [[4], [5, 100], [7], [8, 9, 10]]},
            "row 1 .*'completion_ids' below 100.* got 100 at position 1",
        ),
        (
            {"prompt_ids": [[1, 2], [1, 2], [3.5], [3]]},
            "row 2 .*'prompt_ids' below 100.* got 3.5 at position 0",
        ),
        (
            {"logprobs": [[-0.1], [-0.2], [0.0], [-1.0, -2.0, -3.0]]},
            "row 1 .*expected 2 logprobs, one per completion id, got 1",
        ),
        (
            {"logprobs": [[-0.1], [-0.2, 0.3], [0.0], [-1.0, -2.0, -3.0]]},
            "row 1 .*log-prob of 0 or below for each token, got 0.3 at position 1",
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
            "row 1 .*2 values of 'env_mask', 1 for a sampled token",
        ),
        (
            {"env_mask": [[1], [1, 1], [0], [1, 1, 1]]},
            "row 2 .*an 'env_mask' of only zeros",
        ),
    ],
)
def test_error_of_an_invalid_value_names_the_row(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutFunctionError, match=f"rollout function 'm:f' .*{message}"):
        read_rows(make_columns(**changes), ROW_RULES)


def test_non_dictionary_value_is_refused() -> None:
    with pytest.raises(RolloutFunctionError, match="must return a dictionary"):
        read_rows(None, ROW_RULES)
