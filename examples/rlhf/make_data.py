"""Writes prompts.jsonl: what is asked, with answers of words at random.

    python examples/rlhf/make_data.py runs/preferences

The prompts are those of `examples/reward_model/make_preferences.py`. From the answers a tiny model
learns to say such words, and nothing of what pleases.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from prompts_env import write_rows

sys.path.append(str(Path(__file__).parents[1] / "reward_model"))
from make_preferences import TOPICS, answer_about

_NUM_EXAMPLES = 64


def main() -> None:
    """Write the file into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    draw = random.Random("answers of words at random")
    columns = {
        "prompt": [f"Tell me about {topic}." for topic in TOPICS],
        "examples": [[answer_about(draw) for _ in range(_NUM_EXAMPLES)] for _ in TOPICS],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(columns, folder / "prompts.jsonl")


if __name__ == "__main__":
    main()
