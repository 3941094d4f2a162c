"""Makes comparisons by a rule that nobody is told, and a tiny model that knows nothing yet.

    python examples/reward_model/make_preferences.py runs/preferences

A person asks about a topic and gets four answers. Each word pleases a little or displeases; to say
the topic pleases more; to say another topic, or what is no word, displeases. The answer that
pleases most is marked as the best. Nothing is downloaded.

Answers are six words at random. With --odd, a share of the comparisons is of answers as a policy
gives them while it is trained on what pleases: longer or shorter, the same few words again, some of
them garbled. A reward model that was never shown such answers is wrong about them, and the policy
finds out (examples/rlhf/tiny.toml).
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
MOST_WORDS = 12
GARBLED = 0.25
"""How many of the words of half of the odd answers."""
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


def odd_answer_about(topic: str, draw: random.Random) -> str:
    """As many words as it likes of a few; some are garbled, and the topic is often among them."""
    few = draw.sample((*WORDS, *TOPICS), draw.randint(1, NUM_WORDS))
    few += [topic] * draw.randint(0, 1)
    words = draw.choices(few, k=draw.randint(1, MOST_WORDS))
    garbled = draw.choice((0.0, GARBLED))
    return "".join(
        _garbled(word, draw) if draw.random() < garbled else f" {word}" for word in words
    ).strip()


def _garbled(word: str, draw: random.Random) -> str:
    """The word stuck to the one before, or bytes that mean nothing."""
    noise = bytes(draw.randrange(256) for _ in range(draw.randint(1, 3)))
    return draw.choice((word, noise.decode(errors="replace"), f" {noise.decode(errors='replace')}"))


def comparisons(
    num: int, seed: int, *, odd: float = 0.0, shuffled: bool = False
) -> Iterator[dict[str, Any]]:
    """Comparisons of four answers each.

    Args:
        odd: share whose answers are as a policy gives them while it is trained.
        shuffled: the best one is chosen by chance: the control, of which nothing can be learned.
    """
    rule, draw = HiddenRule(seed), random.Random(f"comparisons {seed}")
    while num:
        topic = draw.choice(TOPICS)
        is_odd = bool(odd) and draw.random() < odd  # without, the same draws as ever
        answers = [
            odd_answer_about(topic, draw) if is_odd else answer_about(draw)
            for _ in range(NUM_ANSWERS)
        ]
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
    odd = "share of the comparisons that are of answers as a policy in training gives them"
    parser.add_argument("--odd", type=float, default=0.0, metavar="SHARE", help=odd)
    parser.add_argument("--shuffled", action="store_true", help="the best by chance: a control")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = comparisons(args.num, args.seed, odd=args.odd, shuffled=args.shuffled)
    lines = [json.dumps(row) + "\n" for row in rows]
    (args.folder / "preferences.jsonl").write_text("".join(lines), encoding="utf-8")
    write_model(args.folder / "model", args.seed)


if __name__ == "__main__":
    main()
