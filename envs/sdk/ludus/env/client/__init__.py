"""Asynchronous, synchronous and typed clients of environment servers and gateways."""

from ludus.env.client.client import AsyncEnvClient, AsyncSession
from ludus.env.client.sync import EnvClient, Session
from ludus.env.client.typed import TypedEnv, TypedResult
from ludus.env.transports.interface import ConnectOptions

__all__ = [
    "AsyncEnvClient",
    "AsyncSession",
    "ConnectOptions",
    "EnvClient",
    "Session",
    "TypedEnv",
    "TypedResult",
]
