"""The fixed policies that an environment package brings, and what is known of them exactly."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.packages import environment_factory
from ludus.proto.errors import NotFoundError


def fixed_policies(
    package: str, options: Mapping[str, Any], wanted: Sequence[str]
) -> dict[str, FixedPolicy]:
    """The fixed policies of a package by name; all of them where none is wanted by name.

    Raises:
        NotFoundError: the package has no fixed policies, or not those.
    """
    module_name = f"{package}.policies"
    if importlib.util.find_spec(module_name) is None:
        raise NotFoundError(
            f"expected `{module_name}` with `fixed_policies`, found no such module; "
            "an environment package needs it to be benched"
        )
    policies: dict[str, FixedPolicy] = importlib.import_module(module_name).fixed_policies(options)
    unknown = [name for name in wanted if name not in policies]
    if unknown:
        raise NotFoundError(f"--policy expected one of {', '.join(policies)}, got '{unknown[0]}'")
    return {name: policies[name] for name in wanted or policies}


def reference_returns(package: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Exact expected returns of fixed policies, by name; empty where none are known.

    `<package>.solutions.reference_returns` takes the options that its values depend on. They
    hold for an environment that was built with nothing else.
    """
    module_name = f"{package}.solutions"
    if importlib.util.find_spec(module_name) is None:
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
