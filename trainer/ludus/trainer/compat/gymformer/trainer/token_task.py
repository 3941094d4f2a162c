"""What a token-level environment asks of a run, found by making one and looking.

"Summarization-v0" --gymnasium.spec--> entry point, keyword arguments
                   --make, reset-----> vocabulary, lengths of prompts, price of the divergence
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

from ludus.env.adapters.gymnasium.token_level import count_tokens
from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean

_MODEL_PARAMETERS = ("model_name", "ref_model_name")
"""Of an environment that reads the policy's tokens; where nothing is said, they are the actor's."""
_NUM_PROMPTS_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class TokenTask:
    """A token-level environment, as a server and a run need to know it."""

    options: dict[str, Any]
    """Of `TokenLevelEnvironment`."""
    num_tokens: int
    """The vocabulary."""
    longest_prompt: int
    """Tokens, of some prompts that were looked at."""
    max_generation: int | None
    """Tokens of an answer, where the environment has a limit of that name."""
    kl_coef: float
    """Price of the divergence from the starting policy; 0 where the environment has none."""

    @classmethod
    def of(cls, env_name: str, model_path: str, max_timesteps: int, seed: int) -> TokenTask:
        """The task of an id that this process knows, for a model.

        Raises:
            NotFoundError: Gymnasium does not know the id.
            ConfigError: it is no token-level environment, or another process could not make it.
        """
        spec = _spec_of(env_name)
        made_with = {**spec.kwargs, **_model_arguments(spec, model_path)}
        environment = gymnasium.make(spec, disable_env_checker=True, **made_with)
        try:
            num_tokens = count_tokens(environment)
            prompts = [environment.reset(seed=seed)]
            prompts += [environment.reset() for _ in range(_NUM_PROMPTS_LOOKED_AT - 1)]
            plain: Any = environment.unwrapped
            return cls(
                options={
                    "env_id": spec.id,
                    **_entry_of(spec),
                    **_as_json(spec.id, made_with),
                    "max_episode_steps": min(
                        max_timesteps, spec.max_episode_steps or max_timesteps
                    ),
                },
                num_tokens=num_tokens,
                longest_prompt=max(len(tokens) for tokens, _ in prompts),
                max_generation=getattr(plain, "max_generation", None),
                kl_coef=float(getattr(plain, "kl_coef", 0.0)),
            )
        finally:
            environment.close()


def _spec_of(env_name: str) -> EnvSpec:
    module, _, env_id = env_name.rpartition(":")
    if "//" in env_name:
        raise ConfigError(
            f"env_name = '{env_name}': a language model is trained in an environment whose id is "
            "known here, got an address; give its Gymnasium id"
        )
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(env_id)
    except ModuleNotFoundError as error:
        raise NotFoundError(f"env_name = '{env_name}': no module '{error.name}'") from error
    except gymnasium.error.Error as error:
        hint = did_you_mean(env_id, gymnasium.registry) or "register it first"
        raise NotFoundError(f"env_name = '{env_name}': Gymnasium has none; {hint}") from error


def _model_arguments(spec: EnvSpec, model_path: str) -> dict[str, str]:
    """The actor's model, for an environment that asks for one and was registered without."""
    assert spec.entry_point is not None
    entry = spec.entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    asked = inspect.signature(creator).parameters
    return {
        name: model_path
        for name in _MODEL_PARAMETERS
        if name in asked and asked[name].default is asked[name].empty and name not in spec.kwargs
    }


def _entry_of(spec: EnvSpec) -> dict[str, str]:
    """Where another process finds the environment.

    Raises:
        ConfigError: it cannot, since the class has no module to be imported from.
    """
    entry = spec.entry_point
    if not isinstance(entry, str):
        entry = f"{getattr(entry, '__module__', '')}:{getattr(entry, '__qualname__', '')}"
    module, _, _ = entry.partition(":")
    found = importlib.util.find_spec(module.partition(".")[0]) if module else None
    if module == "__main__" or "<" in entry or found is None:
        raise ConfigError(
            f"environment '{spec.id}': its server is a process of its own, which cannot import "
            f"'{entry}'; put the class into a module, and register entry_point = 'module:Class'"
        )
    places = list(found.submodule_search_locations or ()) or [found.origin or ""]
    return {"entry_point": entry, "import_from": str(Path(places[0]).absolute().parent)}


def _as_json(env_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment '{env_id}': its server is a process of its own and is told its keyword "
            f"arguments as JSON, but {error}; register it with texts, numbers and lists, such as "
            "the folder of a model in place of the model"
        ) from error
    return arguments
