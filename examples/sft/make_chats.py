"""Writes conversations about sums, and a tiny language model that learns from them.

In a conversation, the user asks for several sums below 10, one after the other. The model has
random weights, so it knows neither the format nor the sums.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ludus.proto.config import TinyModel
from ludus.trainer.models.tiny import make_model, make_tokenizer, save

MODEL = TinyModel(width=64, num_heads=2, intermediate=128, max_tokens=128)
MAX_SUM = 9
MAX_TURNS = 3


def make_conversations(num_conversations: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield conversations of one to three questions."""
    rng = random.Random(seed)
    for _ in range(num_conversations):
        messages = []
        for _ in range(rng.randint(1, MAX_TURNS)):
            total = rng.randint(0, MAX_SUM)
            first = rng.randint(0, total)
            messages.append({"role": "user", "content": f"{first} + {total - first} ="})
            messages.append({"role": "assistant", "content": f"The sum is {total}."})
        yield {"messages": messages}


def write_model(folder: Path, seed: int) -> None:
    """Write the model and its tokenizer."""
    digits = " ".join(map(str, range(MAX_SUM + 1)))
    tokenizer = make_tokenizer([f"{digits} + =", "The sum is."] * 10, MODEL.vocab_size)
    save(make_model(MODEL, tokenizer, seed), tokenizer, folder)


def main() -> None:
    """Write chats.jsonl and model/ to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=2000, help="number of conversations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = make_conversations(args.num, args.seed)
    lines = [json.dumps(row) + "\n" for row in rows]
    (args.folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    write_model(args.folder / "model", args.seed)


if __name__ == "__main__":
    main()
