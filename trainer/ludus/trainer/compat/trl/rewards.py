"""Reward functions of a script as terms of an environment's reward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import nn

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.tools import environment_reward
from ludus.trainer.core.functions import function_path
from ludus.trainer.rollout.reward_function import OWN_ARGUMENTS

_NOT_HERE = frozenset({"trainer_state", "log_extra", "log_metric"})
"""What TRL tells reward functions of its trainer."""


def reward_terms(
    reward_funcs: Any,
    weights: Sequence[float] | None,
    columns: Mapping[str, Set[str]],
    rewarding: str | None = None,
) -> list[dict[str, Any]]:
    """The terms, in their order; of equal names all but the first get a number.

    Args:
        rewarding: the name of environments that say themselves what an episode is worth; it is
            one more term, of weight 1.
        columns: by the name of each data set; none where a rollout function may add others.

    Raises:
        ConfigError: there are none, other weights than functions, or a function asks for a column
            that a data set has not.
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
    terms: list[dict[str, Any]] = []
    for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        term = _term(function, columns)
        name = _free_name(term.pop("name", None), [one.get("name") for one in terms])
        terms.append({**term, "name": name, "weight": float(weight)})
    if rewarding is not None:
        terms.append({"function": function_path(environment_reward), "name": rewarding})
    return terms


def _free_name(name: str | None, taken: Sequence[str | None]) -> str | None:
    """The name with a number, where it is taken."""
    if name is None or name not in taken:
        return name
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(one for one in numbered if one not in taken)


def _term(function: Any, columns: Mapping[str, Set[str]]) -> dict[str, Any]:
    if isinstance(function, str):
        return {"kind": "model", "path": function}
    if not callable(function) or isinstance(function, nn.Module):
        raise ConfigError(
            f"reward_funcs expected functions, or ids and folders of reward models, got "
            f"{function!r:.100}; save a model with save_pretrained, and pass its folder"
        )
    called = getattr(function, "__name__", None)
    needed = _needed(function, called or repr(function))
    for dataset, of_dataset in columns.items():
        missing = sorted(needed - of_dataset - OWN_ARGUMENTS)
        if missing:
            raise ConfigError(
                f"reward function '{called or function}' asks for '{missing[0]}', which {dataset} "
                f"has not; expected columns out of {sorted(of_dataset | OWN_ARGUMENTS)}"
            )
    return {"function": function_path(function), "name": called}


def _needed(function: Any, called: str) -> Set[str]:
    """The arguments without which the function cannot be called.

    Raises:
        ConfigError: nobody can tell, or one of them is not here.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise ConfigError(
            f"reward function '{called}' expected named parameters, got a builtin that tells none; "
            "call it within a function of your own"
        ) from None
    needed = {p.name for p in parameters if p.kind in named and p.default is p.empty}
    absent = sorted(needed & _NOT_HERE)
    if absent:
        raise ConfigError(
            f"reward function '{called}' asks for '{absent[0]}', which is not here: the model is "
            "trained in another process; a function of weight 0 in reward_weights is a metric"
        )
    return needed
