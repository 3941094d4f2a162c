"""Players that cause trouble for a fleet, in a pod of a test, until the pod is deleted.

python fault_player.py ADDRESS TROUBLE NUM_PLAYERS
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
    """Keep a session for a while, then close it for the next player."""
    for _ in range(round(SESSION_S)):
        await session.step({})
        await asyncio.sleep(1.0)


async def _play_forever(session: AsyncSession) -> None:
    """Play without end."""
    while True:
        await session.step({})
        await asyncio.sleep(PAUSE_S)


async def _step_slowly(session: AsyncSession) -> None:
    while True:
        await session.step({"wait_s": SLOW_STEP_S})


async def _cause_error(session: AsyncSession) -> None:
    await session.step({"raises": True})


async def _exit_worker(session: AsyncSession) -> None:
    await session.step({"dies": True})


BEHAVIORS = {
    "crowd": _occupy,
    "hold": _play_forever,
    "slow": _step_slowly,
    "raise": _cause_error,
    "die": _exit_worker,
}


async def _play_sessions(address: str, trouble: str) -> None:
    """Open session after session."""
    async with await AsyncEnvClient.connect(
        address, ConnectOptions(token=os.environ["LUDUS_ENV_TOKEN"])
    ) as client:
        while True:
            try:
                session, _ = await client.open()
                async with session:
                    await BEHAVIORS[trouble](session)
            except EnvError as error:
                sys.stdout.write(f"{type(error).__name__}: {error}\n")
                await asyncio.sleep(PAUSE_S)


async def _connect_without_access(address: str) -> None:
    """Connect again and again with an invalid token."""
    while True:
        try:
            await AsyncEnvClient.connect(
                address, ConnectOptions(token="0" * 64, connect_timeout_s=5.0)
            )
        except EnvError as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
        await asyncio.sleep(PAUSE_S)


async def _main(address: str, trouble: str, num_players: int) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(num_players):
            group.create_task(
                _connect_without_access(address)
                if trouble == "refused"
                else _play_sessions(address, trouble)
            )


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
