"""How GRPOTrainer plays where the script brings no rollout function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.completions import generate_rollout_completions
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.tools import Factory, Tool, ToolRollout, kind_of_factory
from ludus.trainer.core.functions import function_path
from ludus.trainer.rollout.batch.completions import Prompt
from ludus.trainer.rollout.batch.contract import form_of

EnvironmentFactory: TypeAlias = "Factory | Mapping[str, Factory]"


def rollout_of(
    rollout_func: Callable[..., Any] | None,
    tools: Sequence[Tool] | None,
    environment_factory: EnvironmentFactory | None,
    args: GRPOConfig,
) -> Callable[..., Any]:
    """What plays a script's episodes.

    Raises:
        ConfigError: a rollout function beside tools or environments, which it would never see.
    """
    if not tools and environment_factory is None:
        return sample if rollout_func is None else _checked(rollout_func)
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func plays the episodes itself, so tools and environment_factory would go "
            "unheard; pass the one or the others"
        )
    factories = _by_name(environment_factory)
    return ToolRollout(tools or (), factories, args.max_tool_calling_iterations)


def _checked(rollout_func: Any) -> Callable[..., Any]:
    """The function, which has one of TRL's forms."""
    if not callable(rollout_func):
        raise ConfigError(f"rollout_func expected a function, got {rollout_func!r:.80}")
    form_of(rollout_func, function_path(rollout_func))
    return rollout_func


def rewarding_kind(environment_factory: EnvironmentFactory | None) -> str | None:
    """The names of the environments that say what an episode is worth; None where none does."""
    kinds = [kind_of_factory(one) for one in _by_name(environment_factory).values()]
    names = [kind.__name__ for kind in kinds if hasattr(kind, "get_reward")]
    return "_".join(dict.fromkeys(names)) or None


def _by_name(factory: EnvironmentFactory | None) -> dict[str | None, Factory]:
    if factory is None:
        return {}
    return dict(factory.items()) if isinstance(factory, Mapping) else {None: factory}


def sample(prompts: Sequence[Prompt], trainer: Any) -> dict[str, Any]:
    """One completion for each prompt: text as it is, messages through the chat template."""
    outputs = generate_rollout_completions(trainer, prompts)
    return {
        key: [one[key] for one in outputs] for key in ("prompt_ids", "completion_ids", "logprobs")
    }
