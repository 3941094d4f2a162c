"""The benchmark of an environment's fixed policies, all of which play the same seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.contract.schema import random_policy
from ludus.env.evaluation import (
    EpisodeOutcome,
    FixedPolicy,
    find_common_failure,
    play_policy,
    summarize,
)
from ludus.env.targets.policies import (
    compute_exact_returns,
    find_policies_function,
    load_policies,
)
from ludus.env.targets.targets import is_package, require_package
from ludus.env.types import EnvironmentDescription
from ludus.proto.errors import EpisodesFailedError, NotFoundError, UnavailableError
from ludus.proto.runs import PolicyResult
from ludus.services.cli import env_targets

MAX_CONCURRENT = 256
"""Maximum number of concurrent sessions; a server may allow fewer."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The policies and seeds of a benchmark."""

    package: str | None
    """Target that provides the policies. None means the environment that the server names."""
    policy_names: Sequence[str]
    """Policies to play. Empty means all."""
    seeds: Sequence[int]
    policies_function: str = ""
    """Function that builds the policies from the environment's options, as `module:function`. Empty
    means `policies:fixed_policies` of the package."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result and the speed of one fixed policy."""

    policy_name: str
    result: PolicyResult
    exact_return: float | None
    """Exact expected return; None if the package does not provide it."""
    num_void: int
    """Number of episodes that were lost or failed."""
    steps_per_second: float
    is_game: bool
    """True if the environment is a game, False if it has tasks."""


OnEpisode = Callable[[str, EpisodeOutcome], None]


async def run_benchmark(
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
        policies = _select_policies(package, description, plan)
        exact_returns = compute_exact_returns(package, description.options)
        num_concurrent = min(MAX_CONCURRENT, description.max_sessions)

        async def measure_policy(name: str, policy: FixedPolicy) -> BenchResult:
            started_at_s = time.perf_counter()
            outcomes = await play_policy(
                client,
                policy,
                plan.seeds,
                tasks=description.tasks,
                num_concurrent=num_concurrent,
                on_episode=lambda outcome: on_episode(name, outcome),
            )
            wall_s = time.perf_counter() - started_at_s
            return _summarize_policy(
                name, outcomes, exact_returns.get(name), wall_s, description.is_game
            )

        return [await measure_policy(name, policy) for name, policy in policies.items()]


async def _connect(address: str, token: str | None) -> AsyncEnvClient:
    try:
        options = ConnectOptions(token=token, connect_timeout_s=env_targets.CONNECT_TIMEOUT_S)
        return await AsyncEnvClient.connect(address, options)
    except UnavailableError as error:
        remedy = "start a server with `ludus env serve`, or omit --address"
        raise NotFoundError(f"{error}; {remedy}") from None


def _summarize_policy(
    name: str,
    outcomes: Sequence[EpisodeOutcome],
    exact_return: float | None,
    wall_s: float,
    is_game: bool,
) -> BenchResult:
    num_void = sum(outcome.episode_return is None for outcome in outcomes)
    if num_void == len(outcomes):
        raise EpisodesFailedError(
            f"all {num_void} episodes of policy '{name}' are void; most common reason: "
            f"{find_common_failure(outcomes)}"
        )
    steps_per_second = sum(outcome.num_steps for outcome in outcomes) / wall_s
    return BenchResult(name, summarize(outcomes), exact_return, num_void, steps_per_second, is_game)


def _select_policies(
    package: str, description: EnvironmentDescription, plan: BenchPlan
) -> dict[str, FixedPolicy]:
    """Return the policies to play, by name.

    Every environment has a random policy, which the environment may replace.

    Raises:
        NotFoundError: a policy or the function that builds the policies does not exist.
        ConfigError: the function is not a function, or does not return policies by name.
    """
    function_path = plan.policies_function or find_policies_function(package)
    policies = {"random": random_policy(description)}
    if function_path:
        policies |= load_policies(function_path, description.options)
    for name in plan.policy_names:
        if name not in policies:
            raise NotFoundError(f"--policy must be one of {', '.join(policies)}, got '{name}'")
    return {name: policies[name] for name in plan.policy_names or policies}
