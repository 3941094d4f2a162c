"""What a server has to know of an environment that it never builds itself."""

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
from ludus.env.workers.process import describe_exit, receive_frame
from ludus.env.workers.protocol import WorkerLimits, parsed
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import ConfigError

_WITHIN_S = 60.0
_EXIT_WITHIN_S = 10.0
_MEMORY_ROOM = 1.1
"""A worker needs so much more than it begins with, or no step would ever succeed."""


@dataclass(frozen=True, slots=True)
class Described:
    """What the first worker found."""

    description: EnvironmentDescription
    steps_on_event_loop: bool
    missing: MissingLayers
    """Of the sandbox, said before any foreign object was built."""


async def describe(
    fork_server: ForkServerClient, limits: WorkerLimits, sandbox: Sandbox, check_s: float
) -> Described:
    """What a worker that builds one environment says of it.

    Args:
        check_s: how long it may try whether the environment is deterministic; 0 does not.

    Raises:
        ConfigError: it cannot be built, or not within the limits, or the sandbox lacks what it
            must have.
    """
    ended: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
    process = EnvWorkerProcess(0, lambda how: None if ended.done() else ended.set_result(how))
    connection = await fork_server.describe(process, round(check_s * 1000))
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        async with asyncio.timeout(_WITHIN_S):
            missing = _missing(await receive_frame(reader))
            require_layers(missing, sandbox)
            error = parsed(pb.Error, await receive_frame(reader))
            described = parsed(pb.DescribeResponse, await receive_frame(reader))
            facts = EnvironmentFacts(**orjson.loads(await receive_frame(reader)))
        if error.code:
            raise ConfigError(error.message)
        _require_room(facts, limits)
        description = read_description(described)
        if check_s > 0:
            is_deterministic = await _answer_to_check(reader, check_s)
            description = replace(description, is_deterministic=is_deterministic)
        await fork_server.import_all(facts.modules)
    except TimeoutError:
        raise ConfigError(
            f"expected the environment to be built within {_WITHIN_S:g} s, but it was not"
        ) from None
    except asyncio.IncompleteReadError:
        how = describe_exit(await asyncio.wait_for(ended, _EXIT_WITHIN_S), limits)
        raise ConfigError(f"expected the environment to be built, but {how}") from None
    except (StreamBrokenError, ValueError, TypeError) as failure:
        raise ConfigError(f"the environment's worker said nonsense: {failure}") from None
    finally:
        writer.transport.abort()
        fork_server.kill(process)
    return Described(description, facts.steps_on_event_loop, missing)


def _missing(frame: bytes) -> MissingLayers:
    return {Layer(name): str(why) for name, why in orjson.loads(frame).items()}


def require_layers(missing: MissingLayers, sandbox: Sandbox) -> None:
    """Refuse to serve without layers that the operator asked for.

    Raises:
        ConfigError: one is missing.
    """
    if missing and sandbox.is_required:
        raise ConfigError(
            "expected every layer of the sandbox (require_sandbox), got none of:"
            f" {describe_missing_layers(missing)}; serve on a machine that offers them, or without"
            " --require-sandbox"
        )
    if sandbox.without_network and Layer.NAMESPACES in missing:
        raise ConfigError(
            "expected workers without network (no_network), which takes namespaces, got none:"
            f" {missing[Layer.NAMESPACES]}; serve without --no-network"
        )


def _require_room(facts: EnvironmentFacts, limits: WorkerLimits) -> None:
    needed_mb = facts.memory_mb * _MEMORY_ROOM
    if limits.memory_mb and needed_mb > limits.memory_mb:
        raise ConfigError(
            f"expected a memory_limit_mb of at least {needed_mb:.0f}, because a worker takes"
            f" {facts.memory_mb:.0f} MB before its first step; got {limits.memory_mb}"
        )


async def _answer_to_check(reader: asyncio.StreamReader, check_s: float) -> bool:
    try:
        async with asyncio.timeout(check_s + 1.0):
            return await receive_frame(reader) == b"\1"
    except (TimeoutError, asyncio.IncompleteReadError):
        return False
