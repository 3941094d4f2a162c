"""Random conversations, and files of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = ("HIT", "STAND", "hard 16", "soft 18", "vs", "10", "A")


def make_chat(generator: random.Random, max_turns: int = 3) -> dict[str, Any]:
    """Return a row with a conversation of random words."""
    messages = [{"role": "system", "content": "Play."}] if generator.random() < 0.3 else []
    for _ in range(generator.randint(1, max_turns)):
        for role, max_words in (("user", 6), ("assistant", 3)):
            words = generator.choices(WORDS, k=generator.randint(1, max_words))
            messages.append({"role": role, "content": " ".join(words)})
    return {"messages": messages}


def make_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of random conversations, some of them twice."""
    generator = random.Random(seed)
    rows = [make_chat(generator) for _ in range(num_rows)]
    return [rows[index // 2] if index % 5 == 1 else row for index, row in enumerate(rows)]


def make_rule_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows in which the response follows from the prompt."""
    generator = random.Random(seed)
    hands = [generator.choice(("hard 16", "soft 18")) for _ in range(num_rows)]
    return [
        {"prompt": f"{hand} vs {generator.randint(2, 9)}", "completion": answer}
        for hand in hands
        for answer in ["HIT" if hand == "hard 16" else "STAND"]
    ]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows to a .jsonl file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
