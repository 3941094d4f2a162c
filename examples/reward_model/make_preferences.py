"""Makes comparisons by a rule that nobody is told, and a tiny model that knows nothing yet.

    python examples/reward_model/make_preferences.py runs/preferences

A person asks about a topic and gets four answers of six words. Each word pleases a little or
displeases; to say the topic pleases more, to say another topic displeases. The answer that pleases
most is marked as the best. Nothing is downloaded.
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

TOPICS = ("rivers", "mountains", "trains", "bread", "music", "winter", "chess", "gardens")
WORDS = (
    *("always", "and", "because", "calm", "clear", "cold", "dull", "early", "few", "fine"),
    *("good", "hard", "kind", "late", "long", "loud", "many", "near", "never", "nice"),
    *("often", "old", "plain", "poor", "quiet", "rare", "rich", "short", "slow", "warm"),
)
ON_TOPIC, OFF_TOPIC = 3.0, -2.0
NUM_WORDS, NUM_ANSWERS = 6, 4
LEAST_LEAD = 1.0
"""By which the best answer pleases more than the second: people agree on what they can tell."""
MODEL = TinyModel(width=64, num_heads=2, intermediate=128, max_tokens=64, initializer_range=0.05)


class HiddenRule:
    """What pleases, by words; another for each seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"hidden rule {seed}")
        self._worth = {word: draw.uniform(-1, 1) for word in WORDS}

    def worth(self, topic: str, answer: str) -> float:
        """How much an answer pleases who asked about a topic."""
        return sum(self._worth_of(word, topic) for word in answer.split())

    def _worth_of(self, word: str, topic: str) -> float:
        if word in self._worth:
            return self._worth[word]
        return ON_TOPIC if word == topic else OFF_TOPIC


def answer_about(draw: random.Random) -> str:
    """Six words, of which one may be a topic."""
    words = draw.choices(WORDS, k=NUM_WORDS)
    if draw.random() < 0.5:
        words[draw.randrange(NUM_WORDS)] = draw.choice(TOPICS)
    return " ".join(words)


def comparisons(num: int, seed: int, *, shuffled: bool = False) -> Iterator[dict[str, Any]]:
    """Comparisons of four answers each.

    Args:
        shuffled: the best one is chosen by chance: the control, of which nothing can be learned.
    """
    rule, draw = HiddenRule(seed), random.Random(f"comparisons {seed}")
    while num:
        topic = draw.choice(TOPICS)
        answers = [answer_about(draw) for _ in range(NUM_ANSWERS)]
        worths = [rule.worth(topic, answer) for answer in answers]
        first, second = sorted(worths, reverse=True)[:2]
        if first - second < LEAST_LEAD:
            continue
        best = draw.randrange(NUM_ANSWERS) if shuffled else worths.index(first)
        samples = {f"sample{number}": answer for number, answer in enumerate(answers)}
        yield {"query": f"Tell me about {topic}.", **samples, "best": best}
        num -= 1


def write_model(folder: Path, seed: int) -> None:
    """Write a tiny language model of random weights that has these words as tokens."""
    texts = [f" {word} Tell me about {topic}." for word in WORDS for topic in TOPICS]
    tokenizer = make_tokenizer(texts, MODEL.vocab_size)
    save(make_model(MODEL, tokenizer, seed), tokenizer, folder)


def main() -> None:
    """Write preferences.jsonl and model/ into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=2000, help="comparisons")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true", help="the best by chance: a control")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = comparisons(args.num, args.seed, shuffled=args.shuffled)
    lines = [json.dumps(row) + "\n" for row in rows]
    (args.folder / "preferences.jsonl").write_text("".join(lines), encoding="utf-8")
    write_model(args.folder / "model", args.seed)


if __name__ == "__main__":
    main()
