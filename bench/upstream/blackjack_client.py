"""OpenEnv's own client at blackjack: the load that `bench/environments.py` measures.

Runs in a virtual environment with `openenv`. Arguments: server address, number of sessions, and
how they are driven:

    together    the asynchronous client; every session awaits its own steps
    in-turn     the synchronous client, one for each session, called one after another: so does
                TRL's GRPOTrainer with the environments of its episodes

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

    def begin_call(self):
        """The client's next step, or the reset that the next episode begins with."""
        if self.legal_actions:
            self.num_steps += 1
            return self.client.step({"action_id": self.rng.choice(self.legal_actions)})
        self.next_seed += 1
        self.num_resets += 1
        return self.client.reset(seed=self.next_seed)

    def end_call(self, result):
        """Read what was answered."""
        self.legal_actions = result.observation["legal_actions"]


async def play_together(players, until):
    """Play side by side, each to the call during which the time is up."""

    async def play(player):
        while time.perf_counter() < until:
            player.end_call(await player.begin_call())

    await asyncio.gather(*(play(player) for player in players))


def play_in_turn(players, until):
    """Call one after another until the time is up."""
    while True:
        for player in players:
            player.end_call(player.begin_call())
            if time.perf_counter() >= until:
                return


async def serve_together(address, num_sessions):
    """Play whenever standard input says so, until it ends."""
    clients = [GenericEnvClient(base_url=address) for _ in range(num_sessions)]
    for client in clients:
        await client.connect()
    players = [Player(client, number) for number, client in enumerate(clients)]
    say({"ready": num_sessions})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        begun = begin(players)
        await play_together(players, time.perf_counter() + float(line))
        say(counts(players, begun))
    for client in clients:
        await client.close()


def serve_in_turn(address, num_sessions):
    """The same with synchronous clients."""
    clients = [GenericEnvClient(base_url=address).sync() for _ in range(num_sessions)]
    for client in clients:
        client.connect()
    players = [Player(client, number) for number, client in enumerate(clients)]
    say({"ready": num_sessions})
    while line := sys.stdin.readline():
        begun = begin(players)
        play_in_turn(players, time.perf_counter() + float(line))
        say(counts(players, begun))
    for client in clients:
        client.close()


def begin(players):
    """The clocks, at the beginning of a window."""
    for player in players:
        player.num_steps = player.num_resets = 0
    return time.perf_counter(), time.process_time()


def counts(players, begun):
    """What was done since."""
    started, cpu = begun
    return {
        "steps": sum(player.num_steps for player in players),
        "resets": sum(player.num_resets for player in players),
        "seconds": time.perf_counter() - started,
        "client_cpu_s": time.process_time() - cpu,
    }


def say(answer):
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[3] == "together":
        asyncio.run(serve_together(sys.argv[1], int(sys.argv[2])))
    else:
        serve_in_turn(sys.argv[1], int(sys.argv[2]))
