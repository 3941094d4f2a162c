"""The properties of a token-level environment that a run needs, read from an instance.

"Summarization-v0" --gymnasium.spec--> entry point, keyword arguments
                   --make, reset-----> vocabulary, lengths of prompts, KL coefficient
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from ludus.env.adapters.gymnasium.token_level import read_vocabulary_size
from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean

_MODEL_PARAMETERS = ("model_name", "ref_model_name")
"""Parameters of an environment that take a model; the default is the actor's model."""
_NUM_SAMPLED_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class TokenTask:
    """Properties of a token-level environment that its server and a run need."""

    options: dict[str, Any]
    """Options of `TokenLevelEnvironment`."""
    num_tokens: int
    """Size of the vocabulary."""
    max_prompt_tokens: int
    """Number of tokens of the longest of some sampled prompts."""
    max_generation: int | None
    """Maximum number of tokens per completion; None if the environment has no such attribute."""
    kl_coef: float
    """Coefficient of the KL penalty against the starting policy; 0 if the environment has none."""

    @classmethod
    def inspect(cls, env_name: str, model_path: str, max_steps: int, seed: int) -> TokenTask:
        """Create a registered environment, inspect it and return its task."""
        spec = _find_spec(env_name)
        arguments = {**spec.kwargs, **_make_model_arguments(spec, model_path)}
        environment = gymnasium.make(spec, disable_env_checker=True, **arguments)
        try:
            num_tokens = read_vocabulary_size(environment)
            prompts = [environment.reset(seed=seed)]
            prompts += [environment.reset() for _ in range(_NUM_SAMPLED_PROMPTS - 1)]
            base_environment: Any = environment.unwrapped
            return cls(
                options={
                    "env_id": spec.id,
                    **_make_entry_point_options(spec),
                    **_check_json(spec.id, arguments),
                    "max_episode_steps": min(max_steps, spec.max_episode_steps or max_steps),
                },
                num_tokens=num_tokens,
                max_prompt_tokens=max(len(tokens) for tokens, _ in prompts),
                max_generation=getattr(base_environment, "max_generation", None),
                kl_coef=float(getattr(base_environment, "kl_coef", 0.0)),
            )
        finally:
            environment.close()


def _find_spec(env_name: str) -> EnvSpec:
    module_name, _, env_id = env_name.rpartition(":")
    if "//" in env_name:
        raise ConfigError(
            f"env_name = '{env_name}': a language model cannot be trained at an address; use the "
            "Gymnasium id of a registered environment"
        )
    try:
        if module_name:
            importlib.import_module(module_name)
        return gymnasium.spec(env_id)
    except ModuleNotFoundError as error:
        raise NotFoundError(f"env_name = '{env_name}': no module '{error.name}'") from error
    except gymnasium.error.Error as error:
        hint = did_you_mean(env_id, gymnasium.registry) or "register the environment first"
        raise NotFoundError(
            f"env_name = '{env_name}': the id is not registered in Gymnasium; {hint}"
        ) from error


def _make_model_arguments(spec: EnvSpec, model_path: str) -> dict[str, str]:
    """Return arguments that pass the actor's model to an environment that requires a model."""
    assert spec.entry_point is not None
    entry_point = spec.entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    parameters = inspect.signature(creator).parameters
    return {
        name: model_path
        for name in _MODEL_PARAMETERS
        if name in parameters
        and parameters[name].default is inspect.Parameter.empty
        and name not in spec.kwargs
    }


def _make_entry_point_options(spec: EnvSpec) -> dict[str, str]:
    """Return the options that another process needs to import the environment."""
    entry_point = spec.entry_point
    if not isinstance(entry_point, str):
        names = (getattr(entry_point, name, "") for name in ("__module__", "__qualname__"))
        entry_point = ":".join(names)
    module_name, _, _ = entry_point.partition(":")
    module_spec = importlib.util.find_spec(module_name.partition(".")[0]) if module_name else None
    if module_name == "__main__" or "<" in entry_point or module_spec is None:
        raise ConfigError(
            f"environment '{spec.id}': its server is a separate process, which cannot import "
            f"'{entry_point}'; move the class to a module and register entry_point = 'module:Class'"
        )
    folders = list(module_spec.submodule_search_locations or ())
    paths = folders or [module_spec.origin or ""]
    return {"entry_point": entry_point, "import_from": str(Path(paths[0]).absolute().parent)}


def _check_json(env_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment '{env_id}': its server is a separate process, which receives the keyword "
            f"arguments as JSON, but {error}; register it with strings, numbers and lists, such as "
            "the folder of a model instead of the model"
        ) from error
    return arguments
