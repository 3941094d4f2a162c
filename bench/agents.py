"""Check, in episodes of agents over OpenAI's API, that every sampled token is trained as sampled.

    python bench/agents.py                               ->  bench/results/agents.json
    python bench/agents.py --only langgraph smolagents   keeps the rows of the other agents

    openai        random agents of OpenAI's client: parallel and repeated requests, edited and
                  shortened histories, several choices, stop strings and token limits
    langgraph     examples/agents/langgraph_agent.py and smolagents_agent.py, unchanged: 16 episodes
    smolagents    at a time in a service, tools over MCP, a model warm-started on their prompts

Each token that the engine sampled must occur once, with its log-prob, after the prompt that it was
sampled from. The model then evaluates each whole sequence and must return the same log-probs. The
exit code is 1 if a log-prob differs or an episode of a framework is void.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from machine import machine, read_earlier_runs, write_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "dev"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.agents import exactness
from tests.conformance import frameworks

RESULTS = Path(__file__).parent / "results" / "agents.json"
AGENTS = ("openai", *frameworks.FRAMEWORKS)
MAX_CONCURRENT = 16
TOLERANCE = 1e-4
"""Maximum error of a log-prob in float32, in nats."""


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=AGENTS, metavar="NAME")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    rows = {run["agent"]: run for run in read_earlier_runs(RESULTS)}
    is_exact = True
    for agent in chosen.only:
        load_average, started_s = os.getloadavg()[0], time.perf_counter()
        measurement = _measure(agent, chosen.episodes, chosen.seed)
        rows[agent] = {
            "agent": agent,
            "seed": chosen.seed,
            "machine": machine(),
            "load_average": load_average,
            "seconds": round(time.perf_counter() - started_s, 1),
            **measurement,
        }
        print(json.dumps(rows[agent], indent=2), flush=True)
        is_exact &= measurement["largest_logprob_error"] < TOLERANCE and not measurement.get(
            "num_void"
        )
        runs = [rows[name] for name in AGENTS if name in rows]
        write_runs(RESULTS, "python bench/agents.py", runs)
    return 0 if is_exact else 1


def _measure(agent: str, num_episodes: int, seed: int) -> dict[str, Any]:
    """Return the measurements of an agent's episodes."""
    if agent == "openai":
        return asdict(asyncio.run(exactness.measure(num_episodes, seed)))
    with (
        tempfile.TemporaryDirectory() as folder,
        frameworks.service(agent, Path(folder)) as url,
    ):
        service = {"url": url, "max_concurrent": MAX_CONCURRENT}
        return asdict(asyncio.run(frameworks.measure(service, num_episodes, seed)))


if __name__ == "__main__":
    sys.exit(main())
