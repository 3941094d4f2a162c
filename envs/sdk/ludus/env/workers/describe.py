"""Description of an environment that is built only in workers, never in the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import orjson

from ludus.env.grpc.call_stream import StreamBrokenError
from ludus.env.messages.protobuf import read_description
from ludus.env.sandbox.confine import Layer, MissingLayers, Sandbox, describe_missing_layers
from ludus.env.types import EnvironmentDescription
from ludus.env.workers.child import EnvironmentFacts
from ludus.env.workers.forkserver_client import EnvWorkerProcess, ForkServerClient, WorkerExit
from ludus.env.workers.protocol import OrderKind, WorkerLimits, parse_message
from ludus.env.workers.worker import describe_exit, receive_frame
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import ConfigError

_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 10.0
_MIN_MEMORY_FACTOR = 1.1
"""Minimum memory limit, relative to a worker's initial memory; otherwise every step would fail."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Description of the environment and its sandbox, as reported by the first worker."""

    description: EnvironmentDescription
    steps_on_event_loop: bool
    missing_layers: MissingLayers
    """Missing layers, reported before any third-party code ran in the worker."""


async def describe_in_worker(
    fork_server: ForkServerClient,
    limits: WorkerLimits,
    sandbox: Sandbox,
    determinism_check_s: float,
) -> WorkerDescription:
    """Start a worker that builds an environment, and return its report.

    The worker checks for `determinism_check_s` seconds whether the environment is deterministic.

    Raises:
        ConfigError: the environment cannot be built within the limits, or a required layer of
            the sandbox is missing.
    """
    exit_future: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()

    def on_exit(worker_exit: WorkerExit) -> None:
        if not exit_future.done():  # cancelled after `_EXIT_TIMEOUT_S`
            exit_future.set_result(worker_exit)

    process = EnvWorkerProcess(0, on_exit)
    connection = await fork_server.start(
        OrderKind.DESCRIBE, process, round(determinism_check_s * 1000)
    )
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reasons = orjson.loads(await receive_frame(reader))
            missing_layers = {Layer(name): str(reason) for name, reason in reasons.items()}
            require_layers(missing_layers, sandbox)
            description_message = parse_message(pb.DescribeResponse, await receive_frame(reader))
            facts = EnvironmentFacts(**orjson.loads(await receive_frame(reader)))
        if facts.error:
            raise ConfigError(facts.error)
        _require_memory(facts, limits)
        description = read_description(description_message)
        if determinism_check_s > 0:
            is_deterministic = await _receive_determinism(reader, determinism_check_s)
            description = replace(description, is_deterministic=is_deterministic)
        await fork_server.import_all(facts.modules)
    except TimeoutError:
        raise ConfigError(f"the environment was not built within {_TIMEOUT_S:g} s") from None
    except asyncio.IncompleteReadError:
        exit_reason = describe_exit(await asyncio.wait_for(exit_future, _EXIT_TIMEOUT_S), limits)
        raise ConfigError(f"the environment could not be built: {exit_reason}") from None
    except (StreamBrokenError, ValueError, TypeError) as error:
        raise ConfigError(f"the environment's worker sent an invalid report: {error}") from None
    finally:
        writer.transport.abort()
        fork_server.kill(process)
    return WorkerDescription(description, facts.steps_on_event_loop, missing_layers)


def require_layers(missing_layers: MissingLayers, sandbox: Sandbox) -> None:
    """Check that the layers that the operator requires are active.

    Raises:
        ConfigError: a required layer is missing, or one without which workers are not isolated.
    """
    refused_layers = sandbox.list_refused_layers(missing_layers)
    if refused_layers and sandbox.is_required:
        raise ConfigError(
            "the sandbox lacks layers that require_sandbox requires:"
            f" {describe_missing_layers(missing_layers)}; serve on a machine that supports them, or"
            " without --require-sandbox"
        )
    if refused_layers:
        flags = " ".join(f"--accept-missing {layer}" for layer in refused_layers)
        refused_reasons = {layer: missing_layers[layer] for layer in refused_layers}
        raise ConfigError(
            f"workers would not be isolated, because the sandbox lacks"
            f" {describe_missing_layers(refused_reasons)}; serve on a machine that supports these"
            f" layers, or accept workers without them: {flags}"
        )
    if sandbox.without_network and {Layer.NAMESPACES, Layer.SECCOMP} <= missing_layers.keys():
        raise ConfigError(
            "workers without network (no_network) need namespaces or seccomp, which are not"
            f" supported: {missing_layers[Layer.NAMESPACES]}; serve without --no-network"
        )


def _require_memory(facts: EnvironmentFacts, limits: WorkerLimits) -> None:
    needed_mb = facts.memory_mb * _MIN_MEMORY_FACTOR
    if limits.memory_mb and needed_mb > limits.memory_mb:
        raise ConfigError(
            f"memory_limit_mb must be at least {needed_mb:.0f}, because a worker uses"
            f" {facts.memory_mb:.0f} MB before its first step; got {limits.memory_mb}"
        )


async def _receive_determinism(reader: asyncio.StreamReader, determinism_check_s: float) -> bool:
    try:
        async with asyncio.timeout(determinism_check_s + 1.0):
            return await receive_frame(reader) == b"\1"
    except (TimeoutError, asyncio.IncompleteReadError):
        return False
