"""Reward functions of a script as terms of an environment's reward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.tools import environment_reward
from ludus.trainer.functions import name_of

_ALWAYS = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "episode_return",
        "terminated",
        "status",
        "num_turns",
        "seed",
        "environment",
    }
)
"""What every reward function may ask for (docs/rewards.md)."""


def reward_terms(
    reward_funcs: Any,
    weights: Sequence[float] | None,
    columns: Set[str] | None,
    rewarding: str | None = None,
) -> list[dict[str, Any]]:
    """The terms, in their order.

    Args:
        rewarding: the name of environments that say themselves what an episode is worth; it is
            one more term, of weight 1.
        columns: of the data set; None where a rollout function may add others.

    Raises:
        ConfigError: there are none, other weights than functions, or a function asks for a column
            that the data set has not.
    """
    given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [one for one in given if one is not None]
    if not functions and rewarding is None:
        raise ConfigError("reward_funcs expected at least one function, got none; pass one")
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"GRPOConfig.reward_weights expected {len(functions)} numbers, one per function, got "
            f"{len(weights)}"
        )
    terms = []
    for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        terms.append({**_term(function, columns), "weight": float(weight)})
    if rewarding is not None:
        terms.append({"function": name_of(environment_reward), "name": rewarding})
    return terms


def _term(function: Any, columns: Set[str] | None) -> dict[str, Any]:
    if isinstance(function, str):
        return {"kind": "model", "path": function}
    if not callable(function):
        raise ConfigError(
            f"reward_funcs expected functions, or ids and folders of reward models, got "
            f"{function!r:.100}; save a model with save_pretrained, and pass its folder"
        )
    _check_columns(function, columns)
    return {"function": name_of(function), "name": getattr(function, "__name__", None)}


def _check_columns(function: Any, columns: Set[str] | None) -> None:
    if columns is None:
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in named and p.default is p.empty
    }
    missing = sorted(needed - columns - _ALWAYS)
    if missing:
        raise ConfigError(
            f"reward function '{getattr(function, '__name__', function)}' asks for '{missing[0]}', "
            f"which train_dataset has not; expected columns out of {sorted(columns | _ALWAYS)}"
        )
