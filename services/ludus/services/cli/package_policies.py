"""The fixed policies that an environment brings, and what is known of them exactly."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.env.contract.schema import random_action
from ludus.env.evaluation import FixedPolicy
from ludus.env.targets.targets import environment_factory, is_package
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import NotFoundError

RANDOM = "random"
"""The policy that every environment has."""


def fixed_policies(
    target: str, description: EnvironmentDescription, wanted: Sequence[str]
) -> dict[str, FixedPolicy]:
    """The fixed policies of a target by name; all of them where none is wanted by name.

    Environments that bring none have one that takes random actions.

    Raises:
        NotFoundError: the target has no policies of those names.
    """
    policies = _own_policies(target, description.options) or {RANDOM: _random_policy(description)}
    unknown = [name for name in wanted if name not in policies]
    if unknown:
        raise NotFoundError(f"--policy expected one of {', '.join(policies)}, got '{unknown[0]}'")
    return {name: policies[name] for name in wanted or policies}


def _own_policies(target: str, options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    module_name = f"{target}.policies"
    if not is_package(target) or importlib.util.find_spec(module_name) is None:
        return {}
    policies: dict[str, FixedPolicy] = importlib.import_module(module_name).fixed_policies(options)
    return policies


def _random_policy(description: EnvironmentDescription) -> FixedPolicy:
    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return random_action(description.action_schema, observation, rng)

    return play


def reference_returns(package: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Exact expected returns of fixed policies, by name; empty where none are known.

    `<package>.solutions.reference_returns` takes the options that its values depend on. They
    hold for an environment that was built with nothing else.
    """
    module_name = f"{package}.solutions"
    if not is_package(package) or importlib.util.find_spec(module_name) is None:
        return {}
    solve = importlib.import_module(module_name).reference_returns
    told = {name: options[name] for name in inspect.signature(solve).parameters if name in options}
    plain = environment_factory(package, told)()
    try:
        is_plain = plain.options == options
    finally:
        plain.close()
    return (
        {name: value.expected_return for name, value in solve(**told).items()} if is_plain else {}
    )
