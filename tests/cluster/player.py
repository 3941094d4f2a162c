"""Slow players in a test pod, which write their results when /tmp/stop exists.

Usage: python player.py ADDRESS NUM_PLAYERS MAX_SESSION_S
"""

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

STOP_PATH, RESULT_PATH = Path("/tmp/stop"), Path("/tmp/result.json")


async def _play_session(
    client: AsyncEnvClient, rng: random.Random, duration_s: float
) -> tuple[float, float]:
    """Play one session for `duration_s` seconds; return the times of its open and slowest call."""
    max_call_s, start_s = 0.0, time.monotonic()
    session, transition = await client.open(wait_s=30.0)
    open_s = time.monotonic() - start_s
    while time.monotonic() - start_s < duration_s and not STOP_PATH.exists():
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        call_start_s = time.monotonic()
        if transition.terminated or transition.truncated:
            transition = await session.reset()
        else:
            transition = await session.step({"action_id": rng.randrange(2)})
        max_call_s = max(max_call_s, time.monotonic() - call_start_s)
    await session.close()
    return open_s, max_call_s


async def _play_sessions(address: str, seed: int, max_duration_s: float) -> list[dict[str, object]]:
    """Play sessions one after another; return the result of each session."""
    rng, results = random.Random(seed), list[dict[str, object]]()
    async with await AsyncEnvClient.connect(
        address, ConnectOptions(token=os.environ["LUDUS_ENV_TOKEN"])
    ) as client:
        while not STOP_PATH.exists():
            try:
                duration_s = rng.uniform(2.0, max_duration_s)
                open_s, max_call_s = await _play_session(client, rng, duration_s)
                results.append({"lost": "", "open_s": open_s, "slowest_s": max_call_s})
            except EnvError as error:
                error_text = f"{type(error).__name__}: {error}"
                results.append({"lost": error_text, "open_s": 0.0, "slowest_s": 0.0})
    return results


async def _main(address: str, num_players: int, max_duration_s: float) -> None:
    players = (_play_sessions(address, seed, max_duration_s) for seed in range(num_players))
    results = [
        session_result
        for player_results in await asyncio.gather(*players)
        for session_result in player_results
    ]
    temporary_path = RESULT_PATH.with_suffix(".unfinished")
    temporary_path.write_text(json.dumps(results), encoding="utf-8")
    temporary_path.rename(RESULT_PATH)
    await asyncio.sleep(3600.0)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
