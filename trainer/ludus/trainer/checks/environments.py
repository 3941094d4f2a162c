"""Checks of the environments of a run, before and after their servers start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.subprocess import LocalServer
from ludus.env.targets.targets import environment_factory
from ludus.env.transports.address import parse_address
from ludus.proto.config import LanguageModelRun, LocalEnvironment, RemoteEnvironment
from ludus.proto.errors import ConfigError
from ludus.trainer.checks.names import check_reward_columns, list_reward_functions
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.limits import episode_limits
from ludus.trainer.setup.environments import ConnectedEnvironment, load_fixed_policies
from ludus.trainer.setup.first_prompts import NUM_FIRST_SEEDS, open_first_episode

RESPONSE_TIMEOUT_S = 3.0
_RETRY_INTERVAL_S = 0.2


def check_local_environments(run: LanguageModelRun) -> None:
    """Build each local environment once, and check its reward columns and fixed policies.

    Raises:
        UserError: an environment cannot be built, or lacks a column or a policy.
    """
    for name, config in run.environments.items():
        if not isinstance(config, LocalEnvironment):
            continue
        environment = environment_factory(config.package, config.options)()
        environment.close()
        check_reward_columns(run, name, environment.tasks)
        load_fixed_policies(run, name, config.options)


async def check_remote_addresses(run: LanguageModelRun) -> None:
    """Check that a server listens at the address of each remote environment.

    This check does not use gRPC, so that it may run before other processes are forked.

    Raises:
        ConfigError: nothing listens at an address.
    """
    addresses = {
        name: config.address
        for name, config in run.environments.items()
        if isinstance(config, RemoteEnvironment)
    }
    reasons = await asyncio.gather(*map(_explain_unreachable, addresses.values()))
    unreachable = [
        f"{run.environment_section(name)}.address = '{parse_address(address)}': {reason}"
        for (name, address), reason in zip(addresses.items(), reasons, strict=True)
        if reason is not None
    ]
    if unreachable:
        raise ConfigError(
            "; ".join(unreachable)
            + f"; a server must respond within {RESPONSE_TIMEOUT_S:g} s: start it, or correct the "
            "address"
        )


async def check_server_columns(run: LanguageModelRun, servers: Mapping[str, LocalServer]) -> None:
    """Check the reward columns of the run's own servers.

    This check uses HTTP instead of gRPC, so that it may run before other processes are forked.
    Remote servers are checked after the run has connected to them.

    Raises:
        ConfigError: a column is missing.
    """
    for name, server in servers.items():
        if server.addresses is None or not list_reward_functions(run.environments[name]):
            continue
        async with await AsyncEnvClient.connect(server.addresses.http) as client:
            check_reward_columns(run, name, (await client.describe()).tasks)


async def check_first_prompts(
    run: LanguageModelRun, environments: Mapping[str, ConnectedEnvironment], chat: ChatTokenizer
) -> None:
    """Check that some first prompts of each environment leave room for a completion.

    Episodes with a longer prompt are void. Rollout functions and agents make their own prompts, so
    they are not checked.

    Raises:
        ConfigError: all first prompts are too long.
    """
    for name, environment in environments.items():
        if environment.config.rollout is not None or environment.config.agent is not None:
            continue
        limits = episode_limits(run, name)
        lengths = []
        for seed in range(NUM_FIRST_SEEDS):
            opening, _ = await open_first_episode(environment, seed)
            lengths.append(len(chat.first_prompt(opening.messages, opening.tools)))
            if lengths[-1] + limits.max_completion_tokens <= limits.max_tokens:
                break
        else:
            raise ConfigError(
                f"environment '{name}': first prompts must leave room for a completion of "
                f"rollout.max_completion_tokens = {limits.max_completion_tokens} within "
                f"rollout.max_tokens = {limits.max_tokens}, but the shortest prompt has "
                f"{min(lengths)} tokens; raise rollout.max_tokens, or shorten what the environment "
                "shows"
            )


async def _explain_unreachable(address: str) -> str | None:
    """Return why no server accepts connections at an address, or None if a server does."""
    server = parse_address(address)
    parts = urlsplit(f"//{server.authority}")
    if parts.hostname is None or (getproxies() and not proxy_bypass(parts.hostname)):
        return None  # a proxy may reach servers that this machine cannot reach
    port = parts.port or (443 if server.is_grpc or server.is_secure else 80)
    deadline_s = time.monotonic() + RESPONSE_TIMEOUT_S
    while True:
        try:
            async with asyncio.timeout(max(_RETRY_INTERVAL_S, deadline_s - time.monotonic())):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except OSError as error:
            if time.monotonic() + _RETRY_INTERVAL_S > deadline_s:
                return error.strerror or "no response"
            await asyncio.sleep(_RETRY_INTERVAL_S)
        else:
            writer.close()
            return None
