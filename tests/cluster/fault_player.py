"""Players that cause a problem on a fleet of servers until their pod is deleted.

Usage: python fault_player.py ADDRESS BEHAVIOR NUM_PLAYERS
"""

from __future__ import annotations

import asyncio
import os
import sys

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.transports.address import ConnectOptions
from ludus.proto.errors import EnvError

SESSION_S = 12.0
SLOW_STEP_S = 6.0
PAUSE_S = 0.3


async def _occupy(session: AsyncSession) -> None:
    """Keep the session busy for SESSION_S seconds."""
    for _ in range(round(SESSION_S)):
        await session.step({})
        await asyncio.sleep(1.0)


async def _play_forever(session: AsyncSession) -> None:
    while True:
        await session.step({})
        await asyncio.sleep(PAUSE_S)


async def _step_slowly(session: AsyncSession) -> None:
    while True:
        await session.step({"wait_s": SLOW_STEP_S})


async def _cause_error(session: AsyncSession) -> None:
    await session.step({"raises": True})


async def _exit_worker(session: AsyncSession) -> None:
    await session.step({"exits": True})


BEHAVIORS = {
    "occupy": _occupy,
    "hold": _play_forever,
    "slow": _step_slowly,
    "raise": _cause_error,
    "exit": _exit_worker,
}


async def _play_sessions(address: str, behavior: str) -> None:
    """Open sessions one after another, and run the behavior in each session."""
    async with await AsyncEnvClient.connect(
        address, ConnectOptions(token=os.environ["LUDUS_ENV_TOKEN"])
    ) as client:
        while True:
            try:
                session, _ = await client.open()
                async with session:
                    await BEHAVIORS[behavior](session)
            except EnvError as error:
                sys.stdout.write(f"{type(error).__name__}: {error}\n")
                await asyncio.sleep(PAUSE_S)


async def _connect_without_access(address: str) -> None:
    """Connect repeatedly with an invalid token."""
    while True:
        try:
            await AsyncEnvClient.connect(
                address, ConnectOptions(token="0" * 64, connect_timeout_s=5.0)
            )
        except EnvError as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
        await asyncio.sleep(PAUSE_S)


async def _main(address: str, behavior: str, num_players: int) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(num_players):
            group.create_task(
                _connect_without_access(address)
                if behavior == "unauthorized"
                else _play_sessions(address, behavior)
            )


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
