"""Playing the fixed policies of an environment on the same deals."""

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
"""Sessions open at once, where the server has that many."""
CONNECT_TIMEOUT_S = 3.0
"""How long a server may take to answer at all."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to play."""

    package: str | None
    """The target that the policies come from; None takes what the server names."""
    policies: Sequence[str]
    """By name; empty takes all."""
    seeds: Sequence[int]
    source: str = ""
    """The `module:function` that makes the policies; empty takes the package's own."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """How one fixed policy did, and how fast it was played."""

    name: str
    result: PolicyResult
    exact_return: float | None
    """The expected return by enumeration, where the package knows it."""
    num_void: int
    """Episodes that failed."""
    steps_per_second: float


OnEpisode = Callable[[str, EpisodeOutcome], None]


async def bench(
    plan: BenchPlan, address: str, token: str | None, on_episode: OnEpisode
) -> list[BenchResult]:
    """One result per policy, played one after the other on the same seeds.

    Raises:
        NotFoundError: no server answers at the address, or there is no such policy.
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
            f"{error}; start one with `ludus env serve`, or leave --address out"
        ) from None


def _result(
    name: str, outcomes: Sequence[EpisodeOutcome], exact_return: float | None, wall_s: float
) -> BenchResult:
    num_void = sum(outcome.episode_return is None for outcome in outcomes)
    if num_void == len(outcomes):
        raise EpisodesFailedError(
            f"all {num_void} episodes of policy '{name}' are void, most often: "
            f"{most_common_failure(outcomes)}"
        )
    return BenchResult(
        name=name,
        result=summarize(outcomes),
        exact_return=exact_return,
        num_void=num_void,
        steps_per_second=sum(outcome.num_steps for outcome in outcomes) / wall_s,
    )
