"""The choice of the rollout function with which GRPOTrainer plays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.rollout.completion_service import Prompt
from ludus.trainer.compat.trl.rollout.completions import generate_rollout_completions
from ludus.trainer.compat.trl.rollout.contract import find_signature
from ludus.trainer.compat.trl.settings.config import GRPOConfig
from ludus.trainer.compat.trl.tools import (
    EnvironmentFactory,
    ToolFunction,
    ToolRollout,
    environment_class,
)
from ludus.trainer.core.functions import function_path

EnvironmentFactories: TypeAlias = "EnvironmentFactory | Mapping[str, EnvironmentFactory]"


def choose_rollout(
    rollout_func: Callable[..., Any] | None,
    tools: Sequence[ToolFunction] | None,
    environment_factory: EnvironmentFactories | None,
    args: GRPOConfig,
) -> Callable[..., Any]:
    """Return the function that plays a script's episodes.

    Raises:
        ConfigError: rollout_func is combined with tools or environments, which it would ignore.
    """
    if not tools and environment_factory is None:
        return sample if rollout_func is None else _check_function(rollout_func)
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func plays the episodes itself, so tools and environment_factory would be "
            "ignored; pass either rollout_func or the others"
        )
    factories = _factories_by_name(environment_factory)
    return ToolRollout(tools or (), factories, args.max_tool_calling_iterations)


def _check_function(rollout_func: Any) -> Callable[..., Any]:
    """Return the function if it has one of TRL's signatures."""
    if not callable(rollout_func):
        raise ConfigError(f"rollout_func must be a function, but it is {rollout_func!r:.80}")
    find_signature(rollout_func, function_path(rollout_func))
    return rollout_func


def environment_reward_name(environment_factory: EnvironmentFactories | None) -> str | None:
    """Return the joined names of the environments that score episodes; None if none does."""
    classes = [
        environment_class(factory) for factory in _factories_by_name(environment_factory).values()
    ]
    names = [kind.__name__ for kind in classes if hasattr(kind, "get_reward")]
    return "_".join(dict.fromkeys(names)) or None


def _factories_by_name(
    factory: EnvironmentFactories | None,
) -> dict[str | None, EnvironmentFactory]:
    if factory is None:
        return {}
    return dict(factory.items()) if isinstance(factory, Mapping) else {None: factory}


def sample(prompts: Sequence[Prompt], trainer: Any) -> dict[str, Any]:
    """Sample one completion for each prompt: plain text, or messages with the chat template."""
    outputs = generate_rollout_completions(trainer, prompts)
    keys = ("prompt_ids", "completion_ids", "logprobs")
    return {key: [output[key] for output in outputs] for key in keys}
