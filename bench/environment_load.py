"""Load of the Ludus client on a blackjack server; `bench/environments.py` starts this program.

    program stream ADDRESS --sessions 64 --max-calls-per-message 1    independent sessions
    program pyspiel                                                   only the game, in process

Each line of standard input is a number of seconds. The output is one line of JSON with the steps
and resets completed in that time, and the processor time of this process. Each session plays
episodes with its own seeds and random legal moves. The single measurements

    program opens ADDRESS --in-flight 64 --number 640
    program hold ADDRESS --sessions 2000
    program latency ADDRESS --number 2000

print one line and exit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvloop

from ludus.env.client import AsyncEnvClient, AsyncSession, ConnectOptions
from ludus.env.types import JsonObject, StepResult

SEEDS_PER_SESSION = 1_000_000_000


@dataclass(slots=True)
class Counts:
    """Numbers of completed calls."""

    steps: int = 0
    resets: int = 0


class Player:
    """The policy and the seeds of one session."""

    def __init__(self, session: AsyncSession, first: StepResult, number: int) -> None:
        self.session = session
        self.rng = random.Random(number)
        self.next_seed = number * SEEDS_PER_SESSION
        self.last = first

    async def take_action(self) -> StepResult:
        """Take a random legal action, or start the next episode, and return the result."""
        if self.last.terminated:
            self.next_seed += 1
            self.last = await self.session.reset(seed=self.next_seed)
        else:
            action_id = self.rng.choice(self.last.observation["legal_actions"])
            self.last = await self.session.step({"action_id": action_id})
        return self.last


async def _open_players(client: AsyncEnvClient, num_sessions: int, with_text: bool) -> list[Player]:
    players = []
    for number in range(num_sessions):
        seed = number * SEEDS_PER_SESSION
        session, first = await client.open(seed=seed, with_text=with_text)
        players.append(Player(session, first, number))
    return players


async def play_alone(player: Player, until_s: float, counts: Counts) -> None:
    """Play until the time is over."""
    while time.perf_counter() < until_s:
        result = await player.take_action()
        counts.resets += result.step_index == 0
        counts.steps += result.step_index > 0


async def run_stream(arguments: argparse.Namespace) -> None:
    """Play for each line of standard input, until its end."""
    async with await AsyncEnvClient.connect(
        arguments.address, ConnectOptions(max_calls_per_message=arguments.max_calls_per_message)
    ) as client:
        players = await _open_players(client, arguments.sessions, arguments.with_text)

        async def play(until_s: float, counts: Counts) -> None:
            await asyncio.gather(*(play_alone(player, until_s, counts) for player in players))

        await answer_windows(play)


async def run_pyspiel(arguments: argparse.Namespace) -> None:
    """Play only the game, and compute the fields of an observation, until standard input ends."""
    import pyspiel

    game = pyspiel.load_game("blackjack")
    rng = random.Random(0)

    def observe(state: pyspiel.State) -> tuple[list[float], list[int]]:
        while state.is_chance_node():
            cards = state.legal_actions()
            state.apply_action(cards[int(rng.random() * len(cards))])
        return state.observation_tensor(0), state.legal_actions(0)

    async def play(until_s: float, counts: Counts) -> None:
        while time.perf_counter() < until_s:
            state = game.new_initial_state()
            _, legal_actions = observe(state)
            counts.resets += 1
            while not state.is_terminal():
                state.apply_action(rng.choice(legal_actions))
                _, legal_actions = observe(state)
                counts.steps += 1

    await answer_windows(play)


async def run_opens(arguments: argparse.Namespace) -> None:
    """Print how long opening a session takes, including its first observation."""
    async with await AsyncEnvClient.connect(arguments.address) as client:
        durations_s: list[float] = []

        async def opener(numbers: Iterator[int]) -> None:
            for number in numbers:
                start_s = time.perf_counter()
                session, _ = await client.open(seed=number, with_text=False)
                durations_s.append(time.perf_counter() - start_s)
                await session.close()

        numbers = iter(range(arguments.number))  # shared by all openers
        await asyncio.gather(*(opener(numbers) for _ in range(arguments.in_flight)))
        _print_line(_compute_percentiles(durations_s))


async def run_hold(arguments: argparse.Namespace) -> None:
    """Print how many calls were completed while all sessions were open."""
    async with await AsyncEnvClient.connect(arguments.address) as client:
        players = await _open_players(client, arguments.sessions, False)
        counts = Counts()
        start_s = time.perf_counter()
        for _ in range(arguments.number):
            outcomes = await asyncio.gather(
                *(player.take_action() for player in players), return_exceptions=True
            )
            counts.steps += sum(isinstance(outcome, StepResult) for outcome in outcomes)
        _print_line(
            {
                "sessions": len(players),
                "calls": arguments.number * len(players),
                "answered": counts.steps,
                "calls_per_s": counts.steps / (time.perf_counter() - start_s),
            }
        )


async def run_latency(arguments: argparse.Namespace) -> None:
    """Print the latency of a step in one session."""
    async with await AsyncEnvClient.connect(arguments.address) as client:
        (player,) = await _open_players(client, 1, False)
        durations_s: list[float] = []
        while len(durations_s) < arguments.number:
            start_s = time.perf_counter()
            result = await player.take_action()
            if result.step_index:
                durations_s.append(time.perf_counter() - start_s)
        _print_line(_compute_percentiles(durations_s))


async def answer_windows(play: Callable[[float, Counts], Awaitable[None]]) -> None:
    """Play for the seconds in each line of standard input, and print the counts."""
    _print_line({"ready": True})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        counts = Counts()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        await play(start_s + float(line), counts)
        _print_line(
            {
                "steps": counts.steps,
                "resets": counts.resets,
                "seconds": time.perf_counter() - start_s,
                "client_cpu_s": time.process_time() - start_cpu_s,
            }
        )


def _compute_percentiles(durations_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(durations_s, n=100)
    return {"number": len(durations_s), "p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000}


def _print_line(values: JsonObject) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


LOADS = {
    "stream": run_stream,
    "pyspiel": run_pyspiel,
    "opens": run_opens,
    "hold": run_hold,
    "latency": run_latency,
}


def main() -> None:
    """Run one load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--max-calls-per-message", type=int, default=0)
    parser.add_argument("--with-text", action="store_true")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--number", type=int, default=1000)
    arguments = parser.parse_args()
    uvloop.run(LOADS[arguments.load](arguments))


if __name__ == "__main__":
    main()
