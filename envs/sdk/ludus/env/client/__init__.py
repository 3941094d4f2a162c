"""Asynchronous, synchronous and typed clients of environment servers and gateways."""

from ludus.env.client.client import AsyncEnvClient, EnvClient
from ludus.env.client.session import AsyncSession, Session
from ludus.env.client.typed import TypedEnv, TypedResult
from ludus.env.transports.address import ConnectOptions

__all__ = [
    "AsyncEnvClient",
    "AsyncSession",
    "ConnectOptions",
    "EnvClient",
    "Session",
    "TypedEnv",
    "TypedResult",
]
