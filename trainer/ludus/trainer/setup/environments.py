"""Start of a run's local environment servers, and connections to all environments.

    local:   a server process for each environment, started here and stopped with the run
    remote:  a server that already runs

Local servers start first, so that invalid options are refused before anything expensive starts. The
connections are opened later, because processes must be forked before this process uses gRPC.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.client.resume import check_replayable
from ludus.env.evaluation import FixedPolicy
from ludus.env.serving.subprocess import LocalServer
from ludus.env.transports.address import parse_address
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.config import (
    EnvironmentConfig,
    LanguageModelRun,
    LocalEnvironment,
    RemoteEnvironment,
    ServerConnection,
)
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    UnavailableError,
    did_you_mean,
)
from ludus.proto.runs import ENVIRONMENT_LOG_FILE
from ludus.trainer.core.functions import import_callable
from ludus.trainer.rollout.adapters.environment_adapter import ChatRenderer, make_renderer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectedEnvironment:
    """An environment of a run with an open client."""

    config: EnvironmentConfig
    address: str
    client: AsyncEnvClient
    description: EnvironmentDescription
    renderer: ChatRenderer


def load_fixed_policies(
    run: LanguageModelRun, name: str, options: JsonObject
) -> dict[str, FixedPolicy]:
    """Return the fixed policies that an environment defines, by name."""
    policies: dict[str, FixedPolicy] = {}
    config, section = run.environments[name], run.environment_section(name)
    if config.policies is not None:
        policies = import_callable(config.policies, f"{section}.policies")(options)
    unknown_names = sorted(set(config.baselines) - policies.keys() - {RANDOM_POLICY})
    if unknown_names:
        hint = did_you_mean(unknown_names[0], policies)
        raise ConfigError(
            f"{section}.baselines: '{config.policies}' has no policy {unknown_names}; it has "
            f"{sorted({*policies, RANDOM_POLICY})}{f'; {hint}' if hint else ''}"
        )
    return policies


@contextmanager
def start_local_servers(
    run: LanguageModelRun, log_folder: Path
) -> Iterator[dict[str, LocalServer]]:
    """Start a server for each local environment, by its name; stop the servers after the block."""
    servers: dict[str, LocalServer] = {}
    with ExitStack() as exit_stack:
        # The servers start in this thread, because a server stops when its starting thread ends.
        for name, config in run.environments.items():
            if isinstance(config, LocalEnvironment):
                log_file = log_folder / choose_server_log_name(run, name)
                server = LocalServer(config.package, config.options, config.max_sessions, log_file)
                servers[name] = exit_stack.enter_context(server)
        yield servers


def choose_server_log_name(run: LanguageModelRun, name: str) -> str:
    """Return the name of the log file of an environment's server, in the run's folder."""
    if len(run.environments) == 1:
        return ENVIRONMENT_LOG_FILE
    stem, suffix = os.path.splitext(ENVIRONMENT_LOG_FILE)
    return f"{stem}-{name}{suffix}"


@asynccontextmanager
async def connect_environments(
    run: LanguageModelRun, servers: Mapping[str, LocalServer]
) -> AsyncIterator[dict[str, ConnectedEnvironment]]:
    """Connect to the environments of a run, in its order; disconnect after the block."""
    async with AsyncExitStack() as exit_stack:
        environments = {}
        for name, config in run.environments.items():
            if isinstance(config, RemoteEnvironment):
                address = config.address
            else:
                addresses = servers[name].addresses
                assert addresses is not None
                address = addresses.grpc
            client = await exit_stack.enter_async_context(
                await _connect_client(run.environment_section(name), config, address)
            )
            description = await client.describe()
            if config.resume:
                check_replayable(description)
            if description.tasks is not None and description.tasks.num_test_tasks == 0:
                _log.warning(
                    "environment '%s' reserves none of its %d tasks for evaluation: evaluations "
                    "use training tasks (docs/data.md)",
                    name,
                    description.tasks.num_tasks,
                )
            environments[name] = ConnectedEnvironment(
                config, address, client, description, make_renderer(config, name)
            )
        yield environments


async def fetch_description(run: LanguageModelRun, name: str) -> EnvironmentDescription:
    """Return the description of a remote environment.

    Raises:
        ConfigError: the server is unreachable.
    """
    config = run.environments[name]
    assert isinstance(config, RemoteEnvironment)
    section = run.environment_section(name)
    async with await _connect_client(section, config, config.address) as client:
        return await client.describe()


def make_connect_options(config: EnvironmentConfig | ServerConnection) -> ConnectOptions:
    """Return the client's options for an environment; the token comes from its variable."""
    if not isinstance(config, ServerConnection):
        return ConnectOptions(reconnect_timeout_s=config.reconnect_timeout_s)
    return ConnectOptions(
        token=os.environ.get(config.token_env),
        reconnect_timeout_s=config.reconnect_timeout_s,
        **config.tls.model_dump(),
    )


async def _connect_client(section: str, config: EnvironmentConfig, address: str) -> AsyncEnvClient:
    """Connect to a server; raise ConfigError if it is unreachable."""
    try:
        return await AsyncEnvClient.connect(address, make_connect_options(config))
    except (UnavailableError, AuthenticationError) as error:
        raise ConfigError(f"{section}.address = '{parse_address(address)}': {error}") from error
