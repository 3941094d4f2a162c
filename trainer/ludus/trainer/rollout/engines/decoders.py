"""Batches of sequences that a model extends token by token.

A `Decoder` computes the logits of the next token of each of its sequences. `PaddedDecoder` accepts
sequences of any length at any time. `UniformDecoder` is for models whose caches cannot be padded:
its sequences start with the same length, and all of them end before others start.

Equal sequences share a row of keys and values, and a pass computes each row once. They branch when
their next tokens differ:

    sequences    0 "7 + 2 = 9"    1 "7 + 2 = 9"    2 "7 + 2 = 5"    3 "4 + 4 = 8"
    rows         0 ------------------------------  2                1
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ludus.trainer.rollout.engines.grouped_attention import use_grouped_attention
from ludus.trainer.rollout.engines.key_values import (
    MAX_COPIED_ROWS,
    KeyValueRows,
    KeyValueShape,
)
from ludus.trainer.rollout.engines.prefixes import (
    BLOCK_TOKENS,
    PrefixStore,
    StoredPrefix,
    find_shared_beginnings,
)

_NUM_SPARE_COLUMNS = 64
"""Maximum number of unused columns that are allocated for the next tokens."""
_MAX_PADDING_SHARE = 0.25
_MAX_PADDING_TOKENS = 64
"""Padded tokens that a prefill may have beyond the share; a pass costs as much as so many."""
_MAX_PREFILL_TOKENS = 8192
_MAX_PROBE_ERROR = 0.1
"""Largest difference of logits that passes as rounding, in standard deviations of the logits."""
_PADDABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Types of layers whose caches consist of keys and values only."""


class Decoder(Protocol):
    """A batch of sequences, in the order in which they were added."""

    accepts_any_length: bool
    """True if sequences of different lengths can be added, at any time."""
    bytes_per_token: int
    """Size of the keys and values of a token."""

    def add(self, sequences: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
        """Add sequences; return their logits of the next token, [N, V] float32."""

    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """Append a token to each sequence; return the logits of the next token, [N, V] float32."""

    def keep(self, sequences: Sequence[int], ended: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Remove all sequences but these, which are then numbered in this order.

        `ended` has the numbers of completed sequences, which others may continue, and those of
        their tokens whose keys and values are known.
        """

    def clear(self) -> None:
        """Remove everything that depends on the weights."""


def make_decoder(model: PreTrainedModel, max_prefix_bytes: int) -> Decoder:
    """Return the fastest decoder that the model can use."""
    shape = _find_shape(model)
    if shape is None:
        return UniformDecoder(model)
    attention = model.config._attn_implementation
    use_grouped_attention(model)
    decoder = PaddedDecoder(model, shape, max_prefix_bytes)
    if _computes_padded_rows_correctly(model, decoder):
        return decoder
    model.set_attn_implementation(attention)
    return UniformDecoder(model)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A distinct sequence whose keys and values must be computed, except for a known beginning."""

    index: int
    """Number of the sequence among the distinct sequences."""
    token_ids: Sequence[int]
    prefix: StoredPrefix | None

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens whose keys and values are not known."""
        return len(self.token_ids) - (0 if self.prefix is None else self.prefix.num_tokens)


class PaddedDecoder:
    """A decoder of sequences of different lengths, with unused columns before shorter sequences."""

    accepts_any_length = True

    def __init__(self, model: PreTrainedModel, shape: KeyValueShape, max_prefix_bytes: int) -> None:
        self._model = model
        self._shape = shape
        self.bytes_per_token = shape.bytes_per_token
        self._rows = KeyValueRows(shape, [], 0, 0)
        self._row_by_sequence: list[int] = []
        self._prefixes = PrefixStore(max_prefix_bytes)

    @torch.inference_mode()
    def add(self, sequences: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
        """Add sequences; what they share is computed once, and stored beginnings not at all."""
        index_by_sequence: dict[tuple[int, ...], int] = {}
        indices = [
            index_by_sequence.setdefault(tuple(sequence), len(index_by_sequence))
            for sequence in sequences
        ]
        if self._prefixes.is_enabled:
            self._store_shared_beginnings(list(index_by_sequence))
        prefills = self._make_prefills(list(index_by_sequence))
        parts: list[KeyValueRows] = []
        logits: list[Tensor] = []
        part_row_by_index: dict[int, tuple[int, int]] = {}
        for number, batch in enumerate(_split_prefills(prefills)):
            rows, batch_logits = self._prefill(batch)
            parts.append(rows)
            logits.append(batch_logits)
            part_row_by_index |= {prefill.index: (number, row) for row, prefill in enumerate(batch)}
        part_rows = [part_row_by_index[index] for index in range(len(index_by_sequence))]
        first_row = self._rows.num_rows
        self._row_by_sequence += [first_row + index for index in indices]
        self._append(parts, part_rows, min(max_new_tokens, _NUM_SPARE_COLUMNS))
        return torch.stack([logits[number][row] for number, row in part_rows])[indices]

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """Append a token to each sequence; return the logits of the next token."""
        if self._rows.num_columns == self._rows.capacity:
            self._append([], [], _NUM_SPARE_COLUMNS)
        tokens = torch.tensor(self._branch(token_ids), device=self._shape.device)
        return self._forward(tokens[:, None], self._rows)[self._row_by_sequence]

    def keep(self, sequences: Sequence[int], ended: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Remove all other sequences, and store the completed ones for their next turns."""
        if ended and self._prefixes.is_enabled:
            self._store_completed(ended)
        rows = [self._row_by_sequence[sequence] for sequence in sequences]
        order = self._rows.keep(sorted(set(rows)))
        new_row_by_row = {row: new_row for new_row, row in enumerate(order)}
        self._row_by_sequence = [new_row_by_row[row] for row in rows]

    def clear(self) -> None:
        """Remove all sequences, stored beginnings included."""
        self._rows = KeyValueRows(self._shape, [], 0, 0)
        self._row_by_sequence = []
        self._prefixes.clear()

    def _branch(self, token_ids: Sequence[int]) -> list[int]:
        """Copy the rows whose sequences continue differently; return the next token of each row."""
        next_id_by_row: dict[int, int] = {}
        row_by_continuation: dict[tuple[int, int], int] = {}
        copied_rows: list[int] = []
        for sequence, token_id in enumerate(token_ids):
            row = self._row_by_sequence[sequence]
            new_row = row_by_continuation.get((row, token_id))
            if new_row is None:
                new_row = row
                if row in next_id_by_row:
                    new_row = self._rows.num_rows + len(copied_rows)
                    copied_rows.append(row)
                next_id_by_row[new_row] = token_id
                row_by_continuation[row, token_id] = new_row
            self._row_by_sequence[sequence] = new_row
        self._rows.copy_rows(copied_rows)
        return [next_id_by_row[row] for row in range(self._rows.num_rows)]

    def _store_completed(self, ended: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Store the distinct sequences; drop the last ones if they do not fit."""
        row_by_sequence = {
            tuple(token_ids): self._row_by_sequence[sequence] for sequence, token_ids in ended
        }
        num_fitting = self._prefixes.max_bytes // (self.bytes_per_token * self._rows.num_columns)
        sequences = list(row_by_sequence)[:num_fitting]
        rows = [row_by_sequence[sequence] for sequence in sequences]
        if rows:
            starts = [self._rows.starts[row] for row in rows]
            self._prefixes.add(sequences, self._rows.read_rows(rows), starts)

    def _make_prefills(self, sequences: Sequence[Sequence[int]]) -> list[_Prefill]:
        return [
            _Prefill(index, sequence, self._prefixes.find(sequence))
            for index, sequence in enumerate(sequences)
        ]

    def _store_shared_beginnings(self, sequences: Sequence[Sequence[int]]) -> None:
        """Compute and store beginnings that several sequences share and that are not stored."""
        prefills = self._make_prefills(find_shared_beginnings(sequences))
        prefills = [prefill for prefill in prefills if prefill.num_new_tokens > BLOCK_TOKENS]
        for batch in _split_prefills(prefills):
            rows, _ = self._prefill(batch)
            token_ids = [prefill.token_ids for prefill in batch]
            self._prefixes.add(token_ids, rows.values, rows.starts)

    def _prefill(self, batch: Sequence[_Prefill]) -> tuple[KeyValueRows, Tensor]:
        """Return the keys and values of the sequences, and the logits of their next tokens.

        All rows compute the same number of tokens, so a row may compute known tokens again.
        """
        num_columns = max(len(prefill.token_ids) for prefill in batch)
        num_new = max(prefill.num_new_tokens for prefill in batch)
        num_known = num_columns - num_new
        starts = [num_columns - len(prefill.token_ids) for prefill in batch]
        rows = KeyValueRows(self._shape, starts, num_known, num_columns)
        tokens = []
        for row, (prefill, start) in enumerate(zip(batch, starts, strict=True)):
            if prefill.prefix is not None and start < num_known:
                prefix_values = prefill.prefix.read(num_known - start)
                rows.values[:, :, row, :, start:num_known] = prefix_values
            new_ids = list(prefill.token_ids[-num_new:])
            tokens.append([0] * (num_new - len(new_ids)) + new_ids)
        return rows, self._forward(torch.tensor(tokens, device=self._shape.device), rows)

    def _forward(self, token_ids: Tensor, rows: KeyValueRows) -> Tensor:
        num_columns, num_new = rows.num_columns, token_ids.shape[1]
        starts = torch.tensor(rows.starts, device=self._shape.device)[:, None]
        columns = torch.arange(num_columns + num_new, device=self._shape.device)
        has_padding = max(rows.starts) > 0
        output = self._model(
            input_ids=token_ids,
            position_ids=(columns[num_columns:] - starts).clamp(min=0),
            attention_mask=columns >= starts if has_padding else None,
            past_key_values=rows,
            use_cache=True,
            logits_to_keep=1,
        )
        rows.advance(num_new)
        return output.logits[:, -1].float()

    def _append(
        self, parts: Sequence[KeyValueRows], part_rows: Sequence[tuple[int, int]], num_spare: int
    ) -> None:
        """Append a row for each pair (part, row of the part), without columns that no row uses."""
        old_rows = self._rows
        num_columns = max(rows.max_length for rows in (old_rows, *parts))
        sources = [old_rows] * old_rows.num_rows + [parts[number] for number, _ in part_rows]
        numbers = [*range(old_rows.num_rows), *(row for _, row in part_rows)]
        starts = [
            num_columns - source.num_columns + source.starts[row]
            for source, row in zip(sources, numbers, strict=True)
        ]
        max_rows = len(self._row_by_sequence)
        rows = KeyValueRows(self._shape, starts, num_columns, num_columns + num_spare, max_rows)
        if old_rows.num_rows > 0:
            used = old_rows.values[:, :, : old_rows.num_rows, :, : old_rows.num_columns]
            rows.write_rows(0, used)
        first_row = old_rows.num_rows
        while first_row < len(sources):
            source = sources[first_row]
            last_row = first_row
            while last_row < len(sources) and sources[last_row] is source:
                last_row += 1
            last_row = min(last_row, first_row + MAX_COPIED_ROWS)
            rows.write_rows(first_row, source.read_rows(numbers[first_row:last_row]))
            first_row = last_row
        self._rows = rows


class UniformDecoder:
    """A decoder of sequences of equal length, with the model's own kind of cache."""

    accepts_any_length = False

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        config = model.config.get_text_config()
        # At most as much as if every layer had a key and a value for every head.
        self.bytes_per_token = (
            2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
        )

    @torch.inference_mode()
    def add(self, sequences: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
        """Start with these sequences, which have the same length; equal ones are computed once."""
        row_by_sequence: dict[tuple[int, ...], int] = {}
        rows = [
            row_by_sequence.setdefault(tuple(sequence), len(row_by_sequence))
            for sequence in sequences
        ]
        self._cache = DynamicCache(config=self._model.config)
        logits = self._forward(torch.tensor(list(row_by_sequence), device=self._model.device))
        row_tensor = torch.tensor(rows, device=self._model.device)
        self._cache.reorder_cache(row_tensor)
        return logits[row_tensor]

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """Append a token to each sequence; return the logits of the next token."""
        return self._forward(torch.tensor(token_ids, device=self._model.device)[:, None])

    def keep(self, sequences: Sequence[int], ended: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Remove all other sequences."""
        if sequences:
            self._cache.reorder_cache(torch.tensor(sequences, device=self._model.device))

    def clear(self) -> None:
        """Do nothing: the next `add` replaces the cache."""

    def _forward(self, token_ids: Tensor) -> Tensor:
        output = self._model(
            input_ids=token_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1].float()


def _split_prefills(prefills: Sequence[_Prefill]) -> list[list[_Prefill]]:
    """Return batches of sequences with similar numbers of new tokens."""
    batches: list[list[_Prefill]] = []
    num_tokens = 0
    for prefill in sorted(prefills, key=lambda prefill: prefill.num_new_tokens):
        num_new = prefill.num_new_tokens
        num_padded = num_new * (len(batches[-1]) + 1) if batches else 0
        max_padded = (num_tokens + num_new) * (1 + _MAX_PADDING_SHARE) + _MAX_PADDING_TOKENS
        if batches and num_padded <= min(max_padded, _MAX_PREFILL_TOKENS):
            batches[-1].append(prefill)
            num_tokens += num_new
        else:
            batches.append([prefill])
            num_tokens = num_new
    return batches


@torch.inference_mode()
def _find_shape(model: PreTrainedModel) -> KeyValueShape | None:
    """Return the sizes of the model's keys and values; None if its cache cannot be padded."""
    parameters = inspect.signature(model.forward).parameters
    if not {"position_ids", "attention_mask", "past_key_values"} <= parameters.keys():
        return None
    cache = DynamicCache(config=model.config)
    token_ids = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=token_ids, attention_mask=token_ids, past_key_values=cache)
    if not all(type(layer) in _PADDABLE_LAYERS and layer.is_initialized for layer in cache.layers):
        return None
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    if len({(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}) != 1:
        return None
    first = tensors[0]
    return KeyValueShape(
        len(cache.layers), first.shape[1], first.shape[3], first.dtype, first.device
    )


@torch.inference_mode()
def _computes_padded_rows_correctly(model: PreTrainedModel, decoder: PaddedDecoder) -> bool:
    """Compare two sequences of different lengths in one batch with single passes."""
    sequences = [[1, 2, 3, 4, 5, 6], [3, 1]]
    try:
        decoder.add(sequences, 1)
        padded_logits = decoder.extend([7, 4])
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False
    finally:
        decoder.clear()
    continued = ([*sequences[0], 7], [*sequences[1], 4])
    for logits, sequence in zip(padded_logits, continued, strict=True):
        token_ids = torch.tensor([sequence], device=model.device)
        output = model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
        expected_logits = output.logits[0, -1].float()
        error = (logits - expected_logits).abs().max()
        if error > _MAX_PROBE_ERROR * expected_logits.std():
            return False
    return True
