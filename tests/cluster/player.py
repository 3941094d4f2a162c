"""What a pod of a test runs: slow sessions until /tmp/stop is there, then what became of each."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

from ludus.env.client.client import AsyncEnvClient
from ludus.env.transports.interface import ConnectOptions
from ludus.proto.errors import EnvError

STOP, RESULT = Path("/tmp/stop"), Path("/tmp/result.json")


async def _play(client: AsyncEnvClient, chance: random.Random, lasts_s: float) -> float:
    """Play one session for a while; its slowest call."""
    slowest_s, begun = 0.0, time.monotonic()
    session, state = await client.open(wait_s=30.0)
    while time.monotonic() - begun < lasts_s and not STOP.exists():
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        called = time.monotonic()
        if state.terminated or state.truncated:
            state = await session.reset()
        else:
            state = await session.step({"action_id": chance.randrange(2)})
        slowest_s = max(slowest_s, time.monotonic() - called)
    await session.close()
    return slowest_s


async def _player(address: str, number: int, longest_s: float) -> list[dict[str, object]]:
    """Play session after session; what became of them."""
    chance, played = random.Random(number), list[dict[str, object]]()
    async with await AsyncEnvClient.connect(
        address, ConnectOptions(token=os.environ["LUDUS_ENV_TOKEN"])
    ) as client:
        while not STOP.exists():
            try:
                slowest_s = await _play(client, chance, chance.uniform(2.0, longest_s))
                played.append({"lost": "", "slowest_s": slowest_s})
            except EnvError as error:
                played.append({"lost": f"{type(error).__name__}: {error}", "slowest_s": 0.0})
    return played


async def _main(address: str, num_players: int, longest_s: float) -> None:
    players = (_player(address, number, longest_s) for number in range(num_players))
    played = [session for player in await asyncio.gather(*players) for session in player]
    unfinished = RESULT.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(played), encoding="utf-8")
    unfinished.rename(RESULT)
    await asyncio.sleep(3600.0)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
