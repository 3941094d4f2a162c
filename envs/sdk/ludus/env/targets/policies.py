"""The fixed policies that environment packages define."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from ludus.env.catalogue.importing import has_module, load_object
from ludus.env.catalogue.registry import find_source
from ludus.env.evaluation import FixedPolicy
from ludus.env.targets.targets import environment_factory
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

_POLICIES_MODULE = "policies"
_SOLUTIONS_MODULE = "solutions"


def find_package(target: str) -> str | None:
    """Return the environment package of a target, or None if the target belongs to no package.

    The package of "openspiel:chess" is "openspiel_env".
    """
    prefix, _, name = target.partition(":")
    if not name:
        return target
    source = find_source(prefix)
    return source.package or None if source is not None else None


def find_policies_function(target: str) -> str | None:
    """Return the path of the function that builds the fixed policies of a package, or None."""
    package = find_package(target)
    if package is None or not has_module(f"{package}.{_POLICIES_MODULE}"):
        return None
    return f"{package}.{_POLICIES_MODULE}:fixed_policies"


def compute_exact_returns(target: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the exact expected returns of fixed policies, by name; {} if they are unknown.

    The parameters of `<package>.solutions.reference_returns` are the options on which the returns
    depend. Its results are valid only if the environment has no other options.
    """
    package = find_package(target)
    if package is None or not has_module(f"{package}.{_SOLUTIONS_MODULE}"):
        return {}
    solve = importlib.import_module(f"{package}.{_SOLUTIONS_MODULE}").reference_returns
    parameters = inspect.signature(solve).parameters
    solved_options = {name: options[name] for name in parameters if name in options}
    environment = environment_factory(package, solved_options)()
    try:
        if environment.options != options:
            return {}
    finally:
        environment.close()
    return {name: solution.expected_return for name, solution in solve(**solved_options).items()}


def load_policies(function_path: str, options: JsonObject) -> dict[str, FixedPolicy]:
    """Return the fixed policies that a function builds for an environment's options.

    Raises:
        NotFoundError: the function does not exist.
        ConfigError: it is not a function, or does not return policies by name.
    """
    make_policies = load_object(function_path, function_path)
    if not callable(make_policies):
        raise ConfigError(
            f"--policies must name a function, got {function_path}, which is {make_policies!r}"
        )
    policies = make_policies(options)
    if not isinstance(policies, dict) or not all(map(callable, policies.values())):
        raise ConfigError(
            f"{function_path}(options) must return policies by name, as a dictionary of functions"
            f" (observation, rng) -> action; got {policies!r}"
        )
    return policies
