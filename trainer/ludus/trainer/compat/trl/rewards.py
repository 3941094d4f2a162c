"""Conversion of a script's reward functions into terms of an environment's reward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import nn

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.tools import environment_reward
from ludus.trainer.core.functions import function_path
from ludus.trainer.rollout.rewards.scoring import STANDARD_ARGUMENTS

_UNAVAILABLE = frozenset({"trainer_state", "log_extra", "log_metric"})
"""TRL's arguments of reward functions that show its trainer."""


def reward_terms(
    reward_funcs: Any,
    weights: Sequence[float] | None,
    columns: Mapping[str, Set[str]],
    environment_term: str | None = None,
) -> list[dict[str, Any]]:
    """Return the terms in their order; repeated names get a number.

    Args:
        columns: the columns of each data set; empty if a rollout function may add others.
        environment_term: name of an additional term of weight 1 for environments that score
            episodes themselves.
    """
    if not isinstance(reward_funcs, (list, tuple)):
        reward_funcs = [reward_funcs]
    functions = [function for function in reward_funcs if function is not None]
    if not functions and environment_term is None:
        raise ConfigError("reward_funcs needs at least one function; pass one")
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"GRPOConfig.reward_weights has {len(weights)} numbers, but there are {len(functions)} "
            "reward functions; pass one number for each"
        )
    terms: list[dict[str, Any]] = []
    for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        term = _term(function, columns)
        name = _free_name(term.pop("name", None), [other_term.get("name") for other_term in terms])
        terms.append({**term, "name": name, "weight": float(weight)})
    if environment_term is not None:
        terms.append({"function": function_path(environment_reward), "name": environment_term})
    return terms


def _free_name(name: str | None, used: Sequence[str | None]) -> str | None:
    """Return the name, with a number if it is already used."""
    if name is None or name not in used:
        return name
    candidates = (f"{name}_{number}" for number in itertools.count(2))
    return next(candidate for candidate in candidates if candidate not in used)


def _term(function: Any, columns: Mapping[str, Set[str]]) -> dict[str, Any]:
    if isinstance(function, str):
        return {"kind": "model", "path": function}
    if not callable(function) or isinstance(function, nn.Module):
        raise ConfigError(
            f"reward_funcs must be functions, or ids and folders of reward models, but one is "
            f"{function!r:.100}; save a model with save_pretrained, and pass its folder"
        )
    name = getattr(function, "__name__", None)
    names = _required_arguments(function, name or repr(function))
    for dataset, dataset_columns in columns.items():
        absent_names = sorted(names - dataset_columns - STANDARD_ARGUMENTS)
        if absent_names:
            raise ConfigError(
                f"reward function '{name or function}' requires '{absent_names[0]}', which "
                f"{dataset} "
                "does not have; its arguments must be in "
                f"{sorted(dataset_columns | STANDARD_ARGUMENTS)}"
            )
    return {"function": function_path(function), "name": name}


def _required_arguments(function: Any, name: str) -> Set[str]:
    """Return the arguments without a default."""
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise ConfigError(
            f"reward function '{name}' must have named parameters, but it is a builtin without a "
            "signature; call it in a Python function"
        ) from None
    names = {p.name for p in parameters if p.kind in keyword_kinds and p.default is p.empty}
    unavailable = sorted(names & _UNAVAILABLE)
    if unavailable:
        raise ConfigError(
            f"reward function '{name}' requires '{unavailable[0]}', which is not available, "
            "because the model is trained in another process; for a metric, use a function of "
            "weight 0 in reward_weights"
        )
    return names
