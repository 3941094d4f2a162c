"""The environments of a run, up and connected.

    local:   a server process each, started here and ended with the run
    remote:  a server that is there already

Servers come first: they refuse bad options before anything heavy starts, and processes that
are forked later (Ray's) must be there before this one speaks gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.client.resume import check_replayable
from ludus.env.evaluation import FixedPolicy
from ludus.env.serving.subprocess import LocalServer
from ludus.env.transports.address import parse_address
from ludus.env.types import EnvironmentDescription, JsonObject, PolicyChartPrompt, TaskSet
from ludus.proto.config import (
    EnvironmentConfig,
    FunctionLoss,
    GrpoConfig,
    LanguageModelRun,
    LocalEnvironment,
    RemoteEnvironment,
    RewardTerm,
    ServerAddress,
)
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.errors import AuthenticationError, ConfigError, UnavailableError
from ludus.proto.runs import ENVIRONMENT_LOG_FILE
from ludus.trainer.agents.runners import check_agent
from ludus.trainer.algorithms.policy_loss import LOSS_FUNCTION_FIELD
from ludus.trainer.core.functions import import_object
from ludus.trainer.rollout.renderer import ChatRenderer, make_renderer
from ludus.trainer.rollout.reward_function import check_columns

_log = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 3.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment of a run, connected."""

    config: EnvironmentConfig
    address: str
    client: AsyncEnvClient
    description: EnvironmentDescription
    renderer: ChatRenderer


def check_names(run: LanguageModelRun) -> None:
    """Check that what the run names can be imported, and the chart's prompts made.

    Much of it is used late, and a run must not train for hours to find that out.

    Raises:
        ConfigError: it cannot.
    """
    for environment in run.environments.values():
        if environment.rollout_function is not None:
            import_object(environment.rollout_function, "environment.rollout")
        for field in ("render", "parse", "policies", "policy_chart"):
            path = getattr(environment, field)
            if path is not None:
                import_object(path, f"environment.{field}")
        for path in _functions_of(environment):
            import_object(path, "environment.rewards")
        if environment.agent is not None:
            check_agent(environment.agent)
    if isinstance(run.algorithm, GrpoConfig) and run.algorithm.advantages is not None:
        import_object(run.algorithm.advantages, "algorithm.advantages")
    if isinstance(run.algorithm.loss, FunctionLoss):
        import_object(run.algorithm.loss.function, LOSS_FUNCTION_FIELD)
    chart_prompts(run)


def chart_prompts(run: LanguageModelRun) -> tuple[str, Sequence[PolicyChartPrompt]] | None:
    """The first environment that has prompts for a chart, and those.

    Raises:
        ConfigError: its function fails, or returns what is none.
    """
    for name, environment in run.environments.items():
        path = environment.policy_chart
        if path is None:
            continue
        function = import_object(path, "environment.policy_chart")
        try:
            prompts = list(function())
            is_sound = bool(prompts) and all(one.answers == prompts[0].answers for one in prompts)
        except Exception as error:  # the boundary to the run's own function
            raise ConfigError(
                f"environment.policy_chart = '{path}' raised {type(error).__name__}: {error};"
                " expected a function without arguments that returns a list of PolicyChartPrompt"
            ) from error
        if not is_sound:
            raise ConfigError(
                f"environment.policy_chart = '{path}' returned {len(prompts)} prompts; expected at"
                " least one, and the same answers in all of them"
            )
        return name, prompts
    return None


def fixed_policies(run: LanguageModelRun, name: str, options: JsonObject) -> dict[str, FixedPolicy]:
    """The environment's own fixed policies, which all of its baselines but `random` are.

    Raises:
        ConfigError: it has no policy of that name.
    """
    policies: dict[str, FixedPolicy] = {}
    config, field = run.environments[name], run.section_of(name)
    if config.policies is not None:
        policies = import_object(config.policies, f"{field}.policies")(options)
    unknown = sorted(set(config.baselines) - policies.keys() - {RANDOM_POLICY})
    if unknown:
        raise ConfigError(
            f"{field}.baselines: '{config.policies}' has no policy {unknown}; it has "
            f"{sorted({*policies, RANDOM_POLICY})}"
        )
    return policies


async def check_remote(run: LanguageModelRun) -> None:
    """Check that something listens at the address of each remote environment, all at once.

    This speaks no gRPC, so that it may come before anything heavy starts.

    Raises:
        ConfigError: nothing does at one of them.
    """
    addresses = {
        name: config.address
        for name, config in run.environments.items()
        if isinstance(config, RemoteEnvironment)
    }
    reasons = await asyncio.gather(*map(_why_closed, addresses.values()))
    closed = [
        f"{run.section_of(name)}.address = '{parse_address(address)}': {reason}"
        for (name, address), reason in zip(addresses.items(), reasons, strict=True)
        if reason is not None
    ]
    if closed:
        raise ConfigError(
            "; ".join(closed) + f"; expected a server that answers within {_ANSWERS_WITHIN_S:g} s: "
            "start it, or correct the address"
        )


@contextmanager
def local_servers(run: LanguageModelRun, log_folder: Path) -> Iterator[dict[str, LocalServer]]:
    """The servers that this run owns, by the names of their environments; they end with it.

    Raises:
        UserError: a server refused its package or options.
    """
    servers = {
        name: LocalServer(
            config.package, config.options, config.max_sessions, log_folder / log_file(run, name)
        )
        for name, config in run.environments.items()
        if isinstance(config, LocalEnvironment)
    }
    with ExitStack() as stack:
        # One after the other: a server ends with the thread that started it.
        for server in servers.values():
            stack.enter_context(server)
        yield servers


def log_file(run: LanguageModelRun, name: str) -> str:
    """The name of the file, in the run's folder, that an environment's server logs to."""
    if len(run.environments) == 1:
        return ENVIRONMENT_LOG_FILE
    stem, suffix = os.path.splitext(ENVIRONMENT_LOG_FILE)
    return f"{stem}-{name}{suffix}"


@asynccontextmanager
async def connected(
    run: LanguageModelRun, servers: Mapping[str, LocalServer]
) -> AsyncIterator[dict[str, Environment]]:
    """The environments of the run by name, in its order.

    Raises:
        ConfigError: one of them is not there, refuses the token, or cannot be resumed as its
            section says.
    """
    async with AsyncExitStack() as stack:
        environments = {}
        for name, config in run.environments.items():
            address = _address(config, servers.get(name))
            client = await stack.enter_async_context(
                await _connect(run.section_of(name), config, address)
            )
            description = await client.describe()
            if config.resume:
                check_replayable(description)
            check_rewards_of(run, name, description.tasks)
            if description.tasks is not None and description.tasks.num_test_tasks == 0:
                _log.warning(
                    "environment '%s' holds none of its %d tasks back: evaluations play those that "
                    "are trained on (docs/data.md)",
                    *(name, description.tasks.num_tasks),
                )
            environments[name] = Environment(
                config, address, client, description, make_renderer(config)
            )
        yield environments


async def check_rewards(run: LanguageModelRun, servers: Mapping[str, LocalServer]) -> None:
    """Check that what reward functions ask for is in the data of the run's own servers.

    This speaks HTTP, and no gRPC, so that it may come before anything heavy starts; other servers
    are held to it once they are connected.

    Raises:
        ConfigError: a function asks for a column that the data lacks.
    """
    for name, server in servers.items():
        if server.addresses is None or not _functions_of(run.environments[name]):
            continue
        async with await AsyncEnvClient.connect(server.addresses.http) as client:
            check_rewards_of(run, name, (await client.describe()).tasks)


def check_rewards_of(run: LanguageModelRun, name: str, tasks: TaskSet | None) -> None:
    """Check that what the reward functions of an environment ask for is in its data.

    Raises:
        ConfigError: a function asks for a column that the data lacks.
    """
    config = run.environments[name]
    # What a rollout function or an agent says of an episode takes the place of what the
    # environment says.
    if tasks is not None and config.rollout is None and config.agent is None:
        check_columns(_functions_of(config), tasks.columns, run.section_of(name))


def _functions_of(config: EnvironmentConfig) -> list[str]:
    """The paths of its reward functions."""
    terms = [term for term in config.rewards if isinstance(term, RewardTerm)]
    return [term.function for term in terms if term.function is not None]


def make_connect_options(config: EnvironmentConfig | ServerAddress) -> ConnectOptions:
    """Return the client's options for an environment; the token comes from its variable."""
    if not isinstance(config, ServerAddress):
        return ConnectOptions(reconnect_timeout_s=config.reconnect_timeout_s)
    return ConnectOptions(
        token=os.environ.get(config.token_env),
        reconnect_timeout_s=config.reconnect_timeout_s,
        **config.tls.model_dump(),
    )


def _address(config: EnvironmentConfig, server: LocalServer | None) -> str:
    if isinstance(config, RemoteEnvironment):
        return config.address
    assert server is not None and server.addresses is not None
    return server.addresses.grpc


async def _connect(section: str, config: EnvironmentConfig, address: str) -> AsyncEnvClient:
    """A client; a server that is not there when a run begins is the user's to fix."""
    try:
        return await AsyncEnvClient.connect(address, make_connect_options(config))
    except (UnavailableError, AuthenticationError) as error:
        raise ConfigError(f"{section}.address = '{parse_address(address)}': {error}") from error


async def _why_closed(address: str) -> str | None:
    """Why nothing takes connections at an address; None where something does."""
    server = parse_address(address)
    parts = urlsplit(f"//{server.authority}")
    if parts.hostname is None or (getproxies() and not proxy_bypass(parts.hostname)):
        return None  # a proxy may reach what this machine does not
    port = parts.port or (443 if server.is_grpc or server.is_secure else 80)
    deadline_s = time.monotonic() + _ANSWERS_WITHIN_S
    while True:
        try:
            async with asyncio.timeout(max(_PAUSE_S, deadline_s - time.monotonic())):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except OSError as error:
            if time.monotonic() + _PAUSE_S > deadline_s:
                return error.strerror or "no answer"
            await asyncio.sleep(_PAUSE_S)
        else:
            writer.close()
            return None
