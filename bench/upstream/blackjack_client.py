"""OpenEnv's client as a load on a blackjack server; `bench/environments.py` starts this program.

Runs in a virtual environment with `openenv`. Arguments: server address, number of sessions and
mode:

    together    the asynchronous client; sessions are independent
    in-turn     a synchronous client per session, called one after another, as TRL's GRPOTrainer
                calls the environments of its episodes

Each line of standard input is a number of seconds. The output is one line of JSON with the steps
and resets completed in that time, and the processor time of this process.
"""

import asyncio
import json
import random
import sys
import time

from openenv.core import GenericEnvClient


class Player:
    """A session that plays episodes with random legal moves."""

    def __init__(self, client, number):
        self.client = client
        self.rng = random.Random(number)
        self.next_seed = number * 1_000_000_000
        self.num_steps = self.num_resets = 0
        self.legal_actions = []

    def start_call(self):
        """Call the next step, or the reset of the next episode."""
        if self.legal_actions:
            self.num_steps += 1
            return self.client.step({"action_id": self.rng.choice(self.legal_actions)})
        self.next_seed += 1
        self.num_resets += 1
        return self.client.reset(seed=self.next_seed)

    def record_result(self, result):
        """Record the legal actions of a result."""
        self.legal_actions = result.observation["legal_actions"]


async def play_together(players, until):
    """Play in parallel until the time is over."""

    async def play(player):
        while time.perf_counter() < until:
            player.record_result(await player.start_call())

    await asyncio.gather(*(play(player) for player in players))


def play_in_turn(players, until):
    """Call the players one after another until the time is over."""
    while True:
        for player in players:
            player.record_result(player.start_call())
            if time.perf_counter() >= until:
                return


async def serve_together(address, num_sessions):
    """Play with asynchronous clients for each line of standard input."""
    clients = [GenericEnvClient(base_url=address) for _ in range(num_sessions)]
    for client in clients:
        await client.connect()
    players = [Player(client, number) for number, client in enumerate(clients)]
    print_line({"ready": num_sessions})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        start = reset_counts(players)
        await play_together(players, time.perf_counter() + float(line))
        print_line(counts(players, start))
    for client in clients:
        await client.close()


def serve_in_turn(address, num_sessions):
    """Play with synchronous clients for each line of standard input."""
    clients = [GenericEnvClient(base_url=address).sync() for _ in range(num_sessions)]
    for client in clients:
        client.connect()
    players = [Player(client, number) for number, client in enumerate(clients)]
    print_line({"ready": num_sessions})
    while line := sys.stdin.readline():
        start = reset_counts(players)
        play_in_turn(players, time.perf_counter() + float(line))
        print_line(counts(players, start))
    for client in clients:
        client.close()


def reset_counts(players):
    """Reset the counts and return the wall time and the processor time."""
    for player in players:
        player.num_steps = player.num_resets = 0
    return time.perf_counter(), time.process_time()


def counts(players, start):
    """Return the counts and times since `start`."""
    start_s, start_cpu_s = start
    return {
        "steps": sum(player.num_steps for player in players),
        "resets": sum(player.num_resets for player in players),
        "seconds": time.perf_counter() - start_s,
        "client_cpu_s": time.process_time() - start_cpu_s,
    }


def print_line(values):
    """Write one line of JSON."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[3] == "together":
        asyncio.run(serve_together(sys.argv[1], int(sys.argv[2])))
    else:
        serve_in_turn(sys.argv[1], int(sys.argv[2]))
