"""Clients of environment servers and gateways: asynchronous, synchronous and typed."""

from ludus.env.client.client import AsyncEnvClient, AsyncSession, Reset
from ludus.env.client.sync import EnvClient, Session
from ludus.env.client.typed import TypedEnv, TypedResult

__all__ = [
    "AsyncEnvClient",
    "AsyncSession",
    "EnvClient",
    "Reset",
    "Session",
    "TypedEnv",
    "TypedResult",
]
