"""OpenEnv's own asynchronous client at blackjack: the load that `bench/environments.py` measures.

Runs in a virtual environment with `openenv`. Arguments: server address, number of sessions.
Each line of standard input is a number of seconds; the answer is one line of JSON with the
steps and resets that were answered in that time, and the processor time they took here.
"""

import asyncio
import json
import random
import sys
import time

from openenv.core import GenericEnvClient


class Player:
    """One session that plays episode after episode, any legal move."""

    def __init__(self, client, number):
        self.client = client
        self.rng = random.Random(number)
        self.next_seed = number * 1_000_000_000
        self.num_steps = self.num_resets = 0
        self.legal_actions = []

    async def play(self, until):
        """Returns after the call during which the time is up."""
        while time.perf_counter() < until:
            if self.legal_actions:
                result = await self.client.step({"action_id": self.rng.choice(self.legal_actions)})
                self.num_steps += 1
            else:
                result = await self.client.reset(seed=self.next_seed)
                self.next_seed += 1
                self.num_resets += 1
            self.legal_actions = result.observation["legal_actions"]


async def main(address, num_sessions):
    """Returns when standard input has ended."""
    clients = [GenericEnvClient(base_url=address) for _ in range(num_sessions)]
    for client in clients:
        await client.connect()
    players = [Player(client, number) for number, client in enumerate(clients)]
    say({"ready": num_sessions})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        for player in players:
            player.num_steps = player.num_resets = 0
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(player.play(started + float(line)) for player in players))
        say(
            {
                "steps": sum(player.num_steps for player in players),
                "resets": sum(player.num_resets for player in players),
                "seconds": time.perf_counter() - started,
                "client_cpu_s": time.process_time() - cpu,
            }
        )
    for client in clients:
        await client.close()


def say(answer):
    """Nothing; writes one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
