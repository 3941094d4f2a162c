"""Slow players in a pod of a test; they write their results once /tmp/stop exists."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

from ludus.env.client import AsyncEnvClient
from ludus.env.transports.address import ConnectOptions
from ludus.proto.errors import EnvError

STOP, RESULT = Path("/tmp/stop"), Path("/tmp/result.json")


async def _play(client: AsyncEnvClient, generator: random.Random, lasts_s: float) -> float:
    """Play one session for a while; return the duration of its slowest call."""
    slowest_s, start_s = 0.0, time.monotonic()
    session, state = await client.open(wait_s=30.0)
    while time.monotonic() - start_s < lasts_s and not STOP.exists():
        await asyncio.sleep(generator.uniform(0.2, 1.0))
        call_start_s = time.monotonic()
        if state.terminated or state.truncated:
            state = await session.reset()
        else:
            state = await session.step({"action_id": generator.randrange(2)})
        slowest_s = max(slowest_s, time.monotonic() - call_start_s)
    await session.close()
    return slowest_s


async def _player(address: str, number: int, longest_s: float) -> list[dict[str, object]]:
    """Play session after session; return the result of each."""
    generator, results = random.Random(number), list[dict[str, object]]()
    async with await AsyncEnvClient.connect(
        address, ConnectOptions(token=os.environ["LUDUS_ENV_TOKEN"])
    ) as client:
        while not STOP.exists():
            try:
                slowest_s = await _play(client, generator, generator.uniform(2.0, longest_s))
                results.append({"lost": "", "slowest_s": slowest_s})
            except EnvError as error:
                results.append({"lost": f"{type(error).__name__}: {error}", "slowest_s": 0.0})
    return results


async def _main(address: str, num_players: int, longest_s: float) -> None:
    players = (_player(address, number, longest_s) for number in range(num_players))
    results = [session for player in await asyncio.gather(*players) for session in player]
    unfinished = RESULT.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results), encoding="utf-8")
    unfinished.rename(RESULT)
    await asyncio.sleep(3600.0)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
