"""All comparisons of a data set as tokens: four bytes each, whatever the texts were.

Shapes: N = comparisons, K = answers in each.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ludus.proto.errors import ConfigError
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.reward_model.preferences import Comparison, Said
from ludus.trainer.reward_model.texts import Texts

_FEWEST_PROMPTS = 20
"""With fewer of them, whole prompts cannot be held out in any exact share."""
_BATCHES_IN_POOL = 16
"""Rows of similar length are looked for among so many batches: a random order, little padding."""


@dataclass(frozen=True, slots=True)
class ComparisonSet:
    """Comparisons, ready to be learned from."""

    tokens: np.ndarray
    """int32 [all tokens]"""
    offsets: np.ndarray
    """int64 [N * K + 1] where each answer's tokens begin."""
    best: np.ndarray
    """int64 [N]"""
    prompts: np.ndarray
    """int64 [N] equal numbers are equal prompts."""
    num_left_out: int
    """Comparisons whose answers are all equal: there is nothing to learn from them."""

    @property
    def num_answers(self) -> int:
        """K."""
        return (len(self.offsets) - 1) // len(self.best)

    @property
    def longest(self) -> np.ndarray:
        """int64 [N] tokens of each comparison's longest answer."""
        lengths: np.ndarray = np.diff(self.offsets).reshape(-1, self.num_answers).max(1)
        return lengths

    def rows(self, indices: Sequence[int]) -> list[np.ndarray]:
        """The tokens of all answers of these comparisons, K after K."""
        k = self.num_answers
        places = [index * k + number for index in indices for number in range(k)]
        return [self.tokens[self.offsets[p] : self.offsets[p + 1]] for p in places]

    def fingerprint(self) -> str:
        """Differs where anything does."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.tokens, self.offsets, self.best):
            digest.update(part.tobytes())
        return digest.hexdigest()


def encode(
    comparisons: Iterable[Comparison], texts: Texts, tell: Callable[[int], None]
) -> ComparisonSet:
    """The comparisons as tokens, read one by one.

    Args:
        tell: is called with the number of those read so far.

    Raises:
        ConfigError: one cannot be encoded, or all are of equal answers.
    """
    tokens, offsets, best, prompts = array("i"), array("q", [0]), array("q"), array("q")
    numbers: dict[bytes, int] = {}
    num_left_out = 0
    for number, comparison in enumerate(comparisons, start=1):
        tell(number)
        rows = _encoded(comparison, texts)
        if all(row == rows[0] for row in rows):
            num_left_out += 1
            continue
        for row in rows:
            tokens.extend(row)
            offsets.append(len(tokens))
        best.append(comparison.best)
        prompts.append(numbers.setdefault(_key(comparison.prompt), len(numbers)))
    if len(best) < 2:
        raise ConfigError(
            f"expected two comparisons at least, got {len(best)}, and {num_left_out} whose answers "
            "are all equal"
        )
    whole = (
        np.frombuffer(tokens, np.int32),
        np.frombuffer(offsets, np.int64),
        np.frombuffer(best, np.int64),
        np.frombuffer(prompts, np.int64),
    )
    return ComparisonSet(*whole, num_left_out)


def split(comparisons: ComparisonSet, test_size: float, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of those to train on, and of those held out.

    Comparisons of one prompt are on one side, unless there are but a few prompts.
    """
    num_rows = len(comparisons.best)
    num_wanted = round(test_size * num_rows)
    if num_wanted == 0:
        return list(range(num_rows)), []
    num_wanted = min(num_wanted, num_rows - 1)
    num_prompts = int(comparisons.prompts.max()) + 1
    groups: list[list[int]] = [[] for _ in range(num_prompts)]
    for row, prompt in enumerate(comparisons.prompts.tolist()):
        groups[prompt].append(row)
    if num_prompts < _FEWEST_PROMPTS:
        groups = [[row] for row in range(num_rows)]
    make_random(seed, Stream.REWARD_MODEL_SPLIT).shuffle(groups)
    test: list[int] = []
    train: list[int] = []
    for group in groups:
        is_test = len(test) + len(group) <= num_wanted
        (test if is_test else train).extend(group)
    return sorted(train), sorted(test)


def epoch_batches(
    rows: Sequence[int], longest: np.ndarray, batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """The rows, once each, in batches whose rows are of similar length; the order is random."""
    draw = make_random(seed, Stream.REWARD_MODEL_ORDER, epoch)
    order = draw.sample(rows, len(rows))
    batches: list[list[int]] = []
    pool_size = batch_size * _BATCHES_IN_POOL
    for start in range(0, len(order), pool_size):
        pool = sorted(order[start : start + pool_size], key=lambda row: int(longest[row]))
        batches += _cut(pool, batch_size)
    draw.shuffle(batches)
    return batches


def _cut(rows: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def _encoded(comparison: Comparison, texts: Texts) -> list[list[int]]:
    try:
        return [texts.encode(comparison.prompt, answer) for answer in comparison.answers]
    except ConfigError as error:
        raise ConfigError(f"{comparison.place}: {error}") from error


def _key(prompt: Said) -> bytes:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
