"""The fixed policies that an environment brings, and what is known of them exactly."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.env.contract.schema import random_policy
from ludus.env.evaluation import FixedPolicy
from ludus.env.targets.targets import environment_factory, is_package, load_object
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import ConfigError, NotFoundError

RANDOM = "random"
"""The policy that every environment has."""


def fixed_policies(
    target: str, description: EnvironmentDescription, wanted: Sequence[str], source: str = ""
) -> dict[str, FixedPolicy]:
    """The fixed policies of a target by name; all of them where none is wanted by name.

    Every environment has one that takes random actions, which its own may replace.

    Args:
        source: the `module:function` that makes them of the environment's options; a package's
            own `policies` where it is empty.

    Raises:
        NotFoundError: there are no policies of those names, or there is no such source.
        ConfigError: the source cannot be called with the environment's options.
    """
    own = _policies_of(source, description.options) if source else _of_package(target, description)
    policies = {RANDOM: random_policy(description), **own}
    unknown = [name for name in wanted if name not in policies]
    if unknown:
        raise NotFoundError(f"--policy expected one of {', '.join(policies)}, got '{unknown[0]}'")
    return {name: policies[name] for name in wanted or policies}


def _policies_of(source: str, options: JsonObject) -> dict[str, FixedPolicy]:
    make = load_object(source, source)
    if not callable(make):
        raise ConfigError(f"--policies expected a function, got {source}, which is {make!r}")
    policies = make(options)
    if not isinstance(policies, dict) or not all(callable(one) for one in policies.values()):
        raise ConfigError(
            f"expected {source}(options) to return policies by name, as a dictionary of functions"
            f" (observation, rng) -> action; got {policies!r}"
        )
    return policies


def _of_package(target: str, description: EnvironmentDescription) -> dict[str, FixedPolicy]:
    module_name = f"{target}.policies"
    if not is_package(target) or importlib.util.find_spec(module_name) is None:
        return {}
    return _policies_of(f"{module_name}:fixed_policies", description.options)


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
