"""A thousand wild episodes of agents over OpenAI's API: is every sampled token trained as sampled?

    python bench/agents.py            ->  bench/results/agents.json

The agents are of OpenAI's client. They ask side by side, ask again, edit and shorten their history,
want several answers, stop texts and short ones, and send answers back as clients do. Each token
that the engine sampled must stand once, with its log-prob, after the prompt that it was sampled
after; the model then reads each sequence as a whole, and must find the same log-probs. The exit
code is 1 where one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from machine import setting

from tests.agents.exactness import measure

RESULTS = Path(__file__).parent / "results" / "agents.json"
TOLERANCE = 1e-4
"""Of a log-prob in float32, in nats."""


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    load_average, started_s = os.getloadavg()[0], time.perf_counter()
    found = asyncio.run(measure(chosen.episodes, chosen.seed))
    seconds = time.perf_counter() - started_s
    content = {
        "command": "python bench/agents.py",
        **setting(),
        "seed": chosen.seed,
        "load_average": load_average,
        "seconds": round(seconds, 1),
        **asdict(found),
    }
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(asdict(found), indent=2))
    return 0 if found.largest_logprob_error < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
