"""The benchmark of an environment's fixed policies, all of which play the same seeds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.contract.schema import random_policy
from ludus.env.evaluation import (
    EpisodeOutcome,
    FixedPolicy,
    most_common_failure,
    play_policy,
    summarize,
)
from ludus.env.targets.targets import environment_factory, is_package, load_object, require_package
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import ConfigError, EpisodesFailedError, NotFoundError, UnavailableError
from ludus.proto.runs import PolicyResult

MAX_CONCURRENT = 256
"""Maximum number of concurrent sessions; a server may allow fewer."""
CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for the first response of a server."""
RANDOM_POLICY = "random"
"""Name of the random policy, which every environment has."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The policies and seeds of a benchmark."""

    package: str | None
    """Target that provides the policies. None means the environment that the server names."""
    policies: Sequence[str]
    """Names of the policies to play. Empty means all."""
    seeds: Sequence[int]
    source: str = ""
    """Function that returns the policies, as `module:function`. Empty means `fixed_policies` of the
    package."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result and the speed of one fixed policy."""

    name: str
    result: PolicyResult
    exact_return: float | None
    """Exact expected return; None if the package does not provide it."""
    num_void: int
    """Number of episodes that were lost or failed."""
    steps_per_second: float


OnEpisode = Callable[[str, EpisodeOutcome], None]


async def bench(
    plan: BenchPlan, address: str, token: str | None, on_episode: OnEpisode
) -> list[BenchResult]:
    """Play the policies one after another on the same seeds, and return a result for each.

    Raises:
        NotFoundError: no server responds at the address, or a policy does not exist.
        EpisodesFailedError: all episodes of a policy are void.
    """
    async with await _connect(address, token) as client:
        description = await client.describe()
        package = plan.package or description.name
        if is_package(package):
            require_package(package)
        policies = _select_policies(package, description, plan.policies, plan.source)
        exact_returns = _compute_exact_returns(package, description.options)
        num_concurrent = min(MAX_CONCURRENT, description.max_sessions)

        async def measure_policy(name: str, policy: FixedPolicy) -> BenchResult:
            started_at_s = time.perf_counter()
            outcomes = await play_policy(
                client,
                policy,
                plan.seeds,
                num_concurrent=num_concurrent,
                on_episode=lambda outcome: on_episode(name, outcome),
            )
            wall_s = time.perf_counter() - started_at_s
            return _make_result(name, outcomes, exact_returns.get(name), wall_s)

        return [await measure_policy(name, policy) for name, policy in policies.items()]


async def _connect(address: str, token: str | None) -> AsyncEnvClient:
    try:
        return await AsyncEnvClient.connect(
            address, ConnectOptions(token=token, connect_timeout_s=CONNECT_TIMEOUT_S)
        )
    except UnavailableError as error:
        raise NotFoundError(
            f"{error}; start a server with `ludus env serve`, or omit --address"
        ) from None


def _make_result(
    name: str, outcomes: Sequence[EpisodeOutcome], exact_return: float | None, wall_s: float
) -> BenchResult:
    num_void = sum(outcome.episode_return is None for outcome in outcomes)
    if num_void == len(outcomes):
        raise EpisodesFailedError(
            f"all {num_void} episodes of policy '{name}' are void; most common reason: "
            f"{most_common_failure(outcomes)}"
        )
    return BenchResult(
        name=name,
        result=summarize(outcomes),
        exact_return=exact_return,
        num_void=num_void,
        steps_per_second=sum(outcome.num_steps for outcome in outcomes) / wall_s,
    )


def _select_policies(
    target: str, description: EnvironmentDescription, names: Sequence[str], source: str = ""
) -> dict[str, FixedPolicy]:
    """Return the fixed policies of a target with these names, or all if `names` is empty.

    Every environment has a random policy, which the environment may replace.

    Args:
        source: function that builds the policies from the environment's options, as
            `module:function`. Empty means `policies:fixed_policies` of the package.

    Raises:
        NotFoundError: a policy or the source does not exist.
        ConfigError: the source is not a function, or does not return policies by name.
    """
    if source:
        package_policies = _load_policies(source, description.options)
    else:
        package_policies = _load_package_policies(target, description)
    policies = {RANDOM_POLICY: random_policy(description), **package_policies}
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


def _compute_exact_returns(package: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the exact expected returns of fixed policies, by name; {} if they are unknown.

    The parameters of `<package>.solutions.reference_returns` are the options on which the returns
    depend. Its results are valid only if the environment has no other options.
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
    return {name: solution.expected_return for name, solution in solve(**solved_options).items()}
