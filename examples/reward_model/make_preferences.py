"""Make comparisons by a hidden rule, and a tiny untrained model.

    python examples/reward_model/make_preferences.py runs/preferences

A person asks about a topic and gets four answers. Each word has a small positive or negative score.
The topic has a higher score; another topic, or text that is not a word, has a negative score. The
answer with the highest score is the best. Nothing is downloaded.

Answers are six random words. With --odd, a share of the comparisons has answers like those of a
policy during training: longer or shorter, with few distinct words, some of them garbled. A reward
model that has not seen such answers scores them incorrectly, and the policy exploits this
(examples/rlhf/tiny.toml).
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
ON_TOPIC_SCORE, OFF_TOPIC_SCORE = 3.0, -2.0
NUM_WORDS, NUM_ANSWERS = 6, 4
MAX_WORDS = 12
GARBLED_SHARE = 0.25
"""Share of garbled words, in half of the odd answers."""
MIN_LEAD = 1.0
"""Minimum difference between the best score and the second, so that the best answer is clear."""
MODEL = TinyModel(width=64, num_heads=2, intermediate=128, max_tokens=64, initializer_range=0.05)


class HiddenRule:
    """The scores of words, which depend on the seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"hidden rule {seed}")
        self._scores = {word: rng.uniform(-1, 1) for word in WORDS}

    def score_answer(self, topic: str, answer: str) -> float:
        """Return the score of an answer to a question about a topic."""
        return sum(self._score_word(word, topic) for word in answer.split())

    def _score_word(self, word: str, topic: str) -> float:
        if word in self._scores:
            return self._scores[word]
        return ON_TOPIC_SCORE if word == topic else OFF_TOPIC_SCORE


def make_answer(rng: random.Random) -> str:
    """Return six random words, of which one may be a topic."""
    words = rng.choices(WORDS, k=NUM_WORDS)
    if rng.random() < 0.5:
        words[rng.randrange(NUM_WORDS)] = rng.choice(TOPICS)
    return " ".join(words)


def make_odd_answer(topic: str, rng: random.Random) -> str:
    """Return a random number of words from a small set, often with the topic and garbled words."""
    vocabulary = rng.sample((*WORDS, *TOPICS), rng.randint(1, NUM_WORDS))
    vocabulary += [topic] * rng.randint(0, 1)
    words = rng.choices(vocabulary, k=rng.randint(1, MAX_WORDS))
    garbled_share = rng.choice((0.0, GARBLED_SHARE))
    return "".join(
        _garble(word, rng) if rng.random() < garbled_share else f" {word}" for word in words
    ).strip()


def _garble(word: str, rng: random.Random) -> str:
    """Return the word without a space before it, or random bytes."""
    noise = bytes(rng.randrange(256) for _ in range(rng.randint(1, 3)))
    return rng.choice((word, noise.decode(errors="replace"), f" {noise.decode(errors='replace')}"))


def make_comparisons(
    num_comparisons: int, seed: int, *, odd: float = 0.0, shuffled: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield comparisons of four answers.

    Args:
        num_comparisons: number of comparisons.
        seed: seed of the rule and of the answers.
        odd: share of comparisons with answers like those of a policy during training.
        shuffled: True to choose the best answer at random, as a control.
    """
    rule, rng = HiddenRule(seed), random.Random(f"comparisons {seed}")
    while num_comparisons:
        topic = rng.choice(TOPICS)
        is_odd = bool(odd) and rng.random() < odd  # odd = 0 makes no draw
        answers = [
            make_odd_answer(topic, rng) if is_odd else make_answer(rng) for _ in range(NUM_ANSWERS)
        ]
        scores = [rule.score_answer(topic, answer) for answer in answers]
        best_score, second_score = sorted(scores, reverse=True)[:2]
        if best_score - second_score < MIN_LEAD:
            continue
        best_index = rng.randrange(NUM_ANSWERS) if shuffled else scores.index(best_score)
        samples = {f"sample{index}": answer for index, answer in enumerate(answers)}
        yield {"query": f"Tell me about {topic}.", **samples, "best": best_index}
        num_comparisons -= 1


def write_model(folder: Path, seed: int) -> None:
    """Write a tiny language model with random weights and a token for each word."""
    texts = [f" {word} Tell me about {topic}." for word in WORDS for topic in TOPICS]
    tokenizer = make_tokenizer(texts, MODEL.vocab_size)
    save(make_model(MODEL, tokenizer, seed), tokenizer, folder)


def main() -> None:
    """Write preferences.jsonl and model/ to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=2000, help="number of comparisons")
    parser.add_argument("--seed", type=int, default=0)
    odd = "share of comparisons with answers like those of a policy during training"
    parser.add_argument("--odd", type=float, default=0.0, metavar="SHARE", help=odd)
    parser.add_argument(
        "--shuffled", action="store_true", help="choose the best answer at random, as a control"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = make_comparisons(args.num, args.seed, odd=args.odd, shuffled=args.shuffled)
    lines = [json.dumps(row) + "\n" for row in rows]
    (args.folder / "preferences.jsonl").write_text("".join(lines), encoding="utf-8")
    write_model(args.folder / "model", args.seed)


if __name__ == "__main__":
    main()
