"""The comparisons of a data set: reading, encoding as compact arrays of tokens, and evaluation.

    {"prompt": ..., "chosen": ..., "rejected": ...}                      two answers
    {"query": ..., "sample0": ..., ..., "sample3": ..., "best": 2}       two or more answers

A prompt or an answer is a text or a list of messages. Without a prompt, answers are complete texts
or conversations. Lists of integers are token ids of the model's tokenizer.

Shapes: N = comparisons, K = answers per comparison.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ludus.proto.errors import ConfigError
from ludus.proto.reward_models import PreferenceScores
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.data.rows import Row, read_rows
from ludus.trainer.reward_model.model import Content, RewardModel, TextEncoder, parse_content

_COLUMNS = "prompt, chosen, rejected; or query, sample0, sample1, ..., best"
_MIN_PROMPTS_TO_SPLIT_BY = 20
"""Minimum number of prompts for a split by prompts; with fewer, the split would be too coarse."""
_BATCHES_PER_POOL = 16
"""Number of batches whose rows are sorted by length together. With a larger pool, there is less
padding, but the batches are less random."""
_NUM_COMPARISONS_AT_ONCE = 1024
"""Number of comparisons that are scored together in an evaluation."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several answers to one prompt, one of which is preferred."""

    location: str
    """File and row number, for messages."""
    prompt: Content
    answers: tuple[Content, ...]
    best_index: int
    """Index of the preferred answer."""


@dataclass(frozen=True, slots=True)
class ComparisonSet:
    """Comparisons as arrays of tokens."""

    tokens: np.ndarray
    """int32 [number of all tokens]"""
    offsets: np.ndarray
    """int64 [N * K + 1] start of each answer in `tokens`."""
    best_indices: np.ndarray
    """int64 [N] index of the preferred answer."""
    prompt_numbers: np.ndarray
    """int64 [N] number of each comparison's prompt; equal prompts have the same number."""
    num_left_out: int
    """Number of skipped comparisons, whose answers are all equal."""

    @property
    def num_answers(self) -> int:
        """Number of answers per comparison, K."""
        return (len(self.offsets) - 1) // len(self.best_indices)

    @property
    def max_lengths(self) -> np.ndarray:
        """int64 [N] number of tokens of each comparison's longest answer."""
        lengths: np.ndarray = np.diff(self.offsets).reshape(-1, self.num_answers).max(1)
        return lengths

    def select_rows(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of all answers of these comparisons, K rows per comparison."""
        num_answers = self.num_answers
        return [
            self.tokens[self.offsets[answer] : self.offsets[answer + 1]]
            for index in indices
            for answer in range(index * num_answers, (index + 1) * num_answers)
        ]

    def compute_fingerprint(self) -> str:
        """Return a hash of all comparisons."""
        digest = hashlib.blake2b(digest_size=16)
        for numbers in (self.tokens, self.offsets, self.best_indices):
            digest.update(numbers.tobytes())
        return digest.hexdigest()


def read_comparisons(path: Path) -> Iterator[Comparison]:
    """Yield the comparisons of a data set, which all have the same number of answers."""
    num_answers = 0
    for row in read_rows(path):
        comparison = _parse_row(row)
        num_answers = num_answers or len(comparison.answers)
        if len(comparison.answers) != num_answers:
            raise ConfigError(
                f"{row.location}: the row has {len(comparison.answers)} answers, but the rows "
                f"before have {num_answers}; all rows must have the same number"
            )
        yield comparison
    if not num_answers:
        raise ConfigError(f"data = '{path}' has no rows; give a file with comparisons")


def _parse_row(row: Row) -> Comparison:
    columns = row.columns
    if "chosen" in columns or "rejected" in columns:
        answers = [_read_content(row, "chosen"), _read_content(row, "rejected")]
        prompt = _read_content(row, "prompt") if "prompt" in columns else ""
        return Comparison(row.location, prompt, tuple(answers), 0)
    num_samples = sum(bool(re.fullmatch(r"sample\d+", str(name))) for name in columns)
    if not num_samples:
        raise ConfigError(
            f"{row.location}: the row needs columns {_COLUMNS}; got {sorted(map(str, columns))}"
        )
    answers = [_read_content(row, f"sample{index}") for index in range(num_samples)]
    best_index = _parse_best(row, num_samples)
    return Comparison(row.location, _read_content(row, "query"), tuple(answers), best_index)


def _parse_best(row: Row, num_answers: int) -> int:
    best_value = row.columns.get("best")
    index = int(str(best_value)) if re.fullmatch(r"\s*\d+\s*", str(best_value)) else -1
    if not 0 <= index < num_answers:
        raise ConfigError(
            f"{row.location}: column 'best' must be the number of the preferred sample, 0 to "
            f"{num_answers - 1}, got {best_value!r}"
        )
    if num_answers < 2:
        raise ConfigError(
            f"{row.location}: a comparison needs at least sample0 and sample1, got one sample"
        )
    return index


def _read_content(row: Row, name: str) -> Content:
    return parse_content(row.columns.get(name), f"{row.location}: column '{name}'")


def encode_comparisons(
    comparisons: Iterable[Comparison], encoder: TextEncoder, on_read: Callable[[], None]
) -> ComparisonSet:
    """Encode comparisons one after the other."""
    tokens, offsets = array("i"), array("q", [0])
    best_indices, prompt_numbers = array("q"), array("q")
    number_by_prompt: dict[bytes, int] = {}
    num_left_out = 0
    for comparison in comparisons:
        on_read()
        rows = _encode_answers(comparison, encoder)
        if all(row == rows[0] for row in rows):
            num_left_out += 1
            continue
        for row in rows:
            tokens.extend(row)
            offsets.append(len(tokens))
        best_indices.append(comparison.best_index)
        prompt_hash = _hash_prompt(comparison.prompt)
        prompt_numbers.append(number_by_prompt.setdefault(prompt_hash, len(number_by_prompt)))
    if len(best_indices) < 2:
        raise ConfigError(
            "the data must have at least two comparisons with different answers, got "
            f"{len(best_indices)}, and {num_left_out} with equal answers"
        )
    return ComparisonSet(
        np.frombuffer(tokens, np.int32),
        np.frombuffer(offsets, np.int64),
        np.frombuffer(best_indices, np.int64),
        np.frombuffer(prompt_numbers, np.int64),
        num_left_out,
    )


def split_comparisons(
    comparisons: ComparisonSet, test_size: float, seed: int
) -> tuple[list[int], list[int]]:
    """Return the indices of the training comparisons and of the held-out comparisons.

    Comparisons with the same prompt stay together, unless there are very few prompts.
    """
    num_rows = len(comparisons.best_indices)
    num_test = round(test_size * num_rows)
    if num_test == 0:
        return list(range(num_rows)), []
    num_test = min(num_test, num_rows - 1)
    num_prompts = int(comparisons.prompt_numbers.max()) + 1
    groups: list[list[int]] = [[] for _ in range(num_prompts)]
    for row, prompt in enumerate(comparisons.prompt_numbers.tolist()):
        groups[prompt].append(row)
    if num_prompts < _MIN_PROMPTS_TO_SPLIT_BY:
        groups = [[row] for row in range(num_rows)]
    make_random(seed, Stream.REWARD_MODEL_SPLIT).shuffle(groups)
    train_rows, test_rows = list[int](), list[int]()
    for group in groups:
        is_test = len(test_rows) + len(group) <= num_test
        (test_rows if is_test else train_rows).extend(group)
    if not test_rows:
        # Every prompt has more comparisons than the test set may have: use the smallest prompt.
        test_rows = min(groups, key=len)
        train_rows = [row for group in groups if group is not test_rows for row in group]
    return sorted(train_rows), sorted(test_rows)


def make_epoch_batches(
    rows: Sequence[int], max_lengths: np.ndarray, batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return all rows in random batches; the rows of a batch have similar lengths."""
    generator = make_random(seed, Stream.REWARD_MODEL_ORDER, epoch)
    shuffled_rows = generator.sample(rows, len(rows))
    batches: list[list[int]] = []
    pool_size = batch_size * _BATCHES_PER_POOL
    for pool_start in range(0, len(shuffled_rows), pool_size):
        pool = shuffled_rows[pool_start : pool_start + pool_size]
        pool.sort(key=lambda row: int(max_lengths[row]))
        batches += [pool[start : start + batch_size] for start in range(0, len(pool), batch_size)]
    generator.shuffle(batches)
    return batches


def rank_preferred(scores: Tensor, best_indices: Tensor) -> Tensor:
    """Return the rank of the preferred answer by `scores` [N, K], int64 [N], from 1.

    A tie counts as the worse rank.
    """
    best_scores = scores.gather(1, best_indices[:, None])
    return (scores >= best_scores).sum(1)


def evaluate_comparisons(
    model: RewardModel, comparisons: ComparisonSet, rows: Sequence[int], max_tokens: int
) -> PreferenceScores | None:
    """Evaluate the model on these comparisons; return None if there are none."""
    if not rows:
        return None
    all_scores: list[float] = []
    for start in range(0, len(rows), _NUM_COMPARISONS_AT_ONCE):
        answer_tokens = comparisons.select_rows(rows[start : start + _NUM_COMPARISONS_AT_ONCE])
        all_scores += model.score_tokens(answer_tokens, max_tokens_per_batch=max_tokens)
    scores = torch.tensor(all_scores, dtype=torch.float64).view(len(rows), -1)
    best_indices = torch.from_numpy(comparisons.best_indices[list(rows)])
    ranks = rank_preferred(scores, best_indices)
    return PreferenceScores(
        accuracy=float((ranks == 1).double().mean()),
        mrr=float((1 / ranks).double().mean()),
        loss=float(cross_entropy(scores, best_indices)),
        score_mean=float(scores.mean()),
        score_std=float(scores.std()),
    )


def _encode_answers(comparison: Comparison, encoder: TextEncoder) -> list[list[int]]:
    try:
        return [encoder.encode(comparison.prompt, answer) for answer in comparison.answers]
    except ConfigError as error:
        raise ConfigError(f"{comparison.location}: {error}") from error


def _hash_prompt(prompt: Content) -> bytes:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
