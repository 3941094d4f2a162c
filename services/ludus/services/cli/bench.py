"""Benchmark of an environment's fixed policies on the same seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.evaluation import (
    EpisodeOutcome,
    FixedPolicy,
    most_common_failure,
    play_policy,
    summarize,
)
from ludus.env.targets.targets import is_package, require_package
from ludus.proto.errors import EpisodesFailedError, NotFoundError, UnavailableError
from ludus.proto.runs import PolicyResult
from ludus.services.cli.package_policies import fixed_policies, reference_returns

MAX_CONCURRENT = 256
"""Maximum number of concurrent sessions; a server may allow fewer."""
CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for the first response of a server."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The policies and seeds of a benchmark."""

    package: str | None
    """Target that provides the policies. None: the environment that the server names."""
    policies: Sequence[str]
    """Names of the policies to play. Empty: all."""
    seeds: Sequence[int]
    source: str = ""
    """The `module:function` that returns the policies. Empty: the package's `fixed_policies`."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Result and speed of one fixed policy."""

    name: str
    result: PolicyResult
    exact_return: float | None
    """Expected return by enumeration; None if the package does not provide it."""
    num_void: int
    """Number of episodes that were lost or failed."""
    steps_per_second: float


OnEpisode = Callable[[str, EpisodeOutcome], None]


async def bench(
    plan: BenchPlan, address: str, token: str | None, on_episode: OnEpisode
) -> list[BenchResult]:
    """Play the policies one after the other on the same seeds; return one result per policy.

    Raises:
        NotFoundError: no server responds at the address, or a policy does not exist.
        EpisodesFailedError: all episodes of a policy are void.
    """
    async with await _connect(address, token) as client:
        description = await client.describe()
        package = plan.package or description.name
        if is_package(package):
            require_package(package)
        policies = fixed_policies(package, description, plan.policies, plan.source)
        exact = reference_returns(package, description.options)
        num_concurrent = min(MAX_CONCURRENT, description.max_sessions)

        async def measure(name: str, policy: FixedPolicy) -> BenchResult:
            started_at_s = time.perf_counter()
            outcomes = await play_policy(
                client,
                policy,
                plan.seeds,
                num_concurrent=num_concurrent,
                on_episode=lambda outcome: on_episode(name, outcome),
            )
            wall_s = time.perf_counter() - started_at_s
            return _result(name, outcomes, exact.get(name), wall_s)

        return [await measure(name, policy) for name, policy in policies.items()]


async def _connect(address: str, token: str | None) -> AsyncEnvClient:
    try:
        return await AsyncEnvClient.connect(
            address, ConnectOptions(token=token, connect_timeout_s=CONNECT_TIMEOUT_S)
        )
    except UnavailableError as error:
        raise NotFoundError(
            f"{error}; start a server with `ludus env serve`, or omit --address"
        ) from None


def _result(
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
