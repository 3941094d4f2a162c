"""Write prompts.jsonl: prompts with example answers of random words.

    python examples/rlhf/make_data.py runs/preferences

The prompts are those of `examples/reward_model/make_preferences.py`. A tiny model learns the words
from the answers, but not the hidden rule.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from prompts_env import write_rows

sys.path.append(str(Path(__file__).parents[1] / "reward_model"))
from make_preferences import TOPICS, make_answer

_NUM_EXAMPLES = 64


def main() -> None:
    """Write the file to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rng = random.Random("answers of words at random")
    columns = {
        "prompt": [f"Tell me about {topic}." for topic in TOPICS],
        "examples": [[make_answer(rng) for _ in range(_NUM_EXAMPLES)] for _ in TOPICS],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(columns, folder / "prompts.jsonl")


if __name__ == "__main__":
    main()
