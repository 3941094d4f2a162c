"""An environment's fixed policies and their exact returns."""

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
"""Name of the policy that every environment has."""


def fixed_policies(
    target: str, description: EnvironmentDescription, names: Sequence[str], source: str = ""
) -> dict[str, FixedPolicy]:
    """Return the fixed policies of a target with these names, or all if `names` is empty.

    Every environment has a random policy, which the environment may replace.

    Args:
        source: the `module:function` that builds the policies from the environment's options;
            the package's `policies:fixed_policies` if empty.

    Raises:
        NotFoundError: a policy or the source does not exist.
        ConfigError: the source is not a function, or does not return policies by name.
    """
    if source:
        custom = _load_policies(source, description.options)
    else:
        custom = _load_package_policies(target, description)
    policies = {RANDOM: random_policy(description), **custom}
    for name in names:
        if name not in policies:
            raise NotFoundError(f"--policy must be one of {', '.join(policies)}, got '{name}'")
    return {name: policies[name] for name in names or policies}


def _load_policies(source: str, options: JsonObject) -> dict[str, FixedPolicy]:
    make_policies = load_object(source, source)
    if not callable(make_policies):
        raise ConfigError(
            f"--policies must name a function, got {source}, which is {make_policies!r}"
        )
    policies = make_policies(options)
    if not isinstance(policies, dict) or not all(map(callable, policies.values())):
        raise ConfigError(
            f"{source}(options) must return policies by name, as a dictionary of functions"
            f" (observation, rng) -> action; got {policies!r}"
        )
    return policies


def _load_package_policies(
    target: str, description: EnvironmentDescription
) -> dict[str, FixedPolicy]:
    module_name = f"{target}.policies"
    if not is_package(target) or importlib.util.find_spec(module_name) is None:
        return {}
    return _load_policies(f"{module_name}:fixed_policies", description.options)


def reference_returns(package: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Return exact expected returns of fixed policies, by name; empty if none are known.

    `<package>.solutions.reference_returns` takes the options that its values depend on. The
    values hold only if the environment was built without other options.
    """
    module_name = f"{package}.solutions"
    if not is_package(package) or importlib.util.find_spec(module_name) is None:
        return {}
    solve = importlib.import_module(module_name).reference_returns
    parameters = inspect.signature(solve).parameters
    solved_options = {name: options[name] for name in parameters if name in options}
    environment = environment_factory(package, solved_options)()
    try:
        if environment.options != options:
            return {}
    finally:
        environment.close()
    return {name: value.expected_return for name, value in solve(**solved_options).items()}
