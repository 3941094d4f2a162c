"""The fixed policies that environment packages define."""

from __future__ import annotations

import importlib.util

from ludus.env.evaluation import FixedPolicy
from ludus.env.targets.targets import is_package, load_object
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

_POLICIES_MODULE = "policies"


def find_policies_function(package: str) -> str | None:
    """Return the path of the function that builds a package's fixed policies, or None."""
    if not has_module(package, _POLICIES_MODULE):
        return None
    return f"{package}.{_POLICIES_MODULE}:fixed_policies"


def has_module(package: str, module: str) -> bool:
    """Return whether an environment package has a module of this name."""
    try:
        return is_package(package) and importlib.util.find_spec(f"{package}.{module}") is not None
    except (ImportError, ValueError):
        return False


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
