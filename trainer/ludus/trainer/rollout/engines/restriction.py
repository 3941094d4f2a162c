"""Restriction of the next token's logits to the tokens with which legal answers continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ludus.trainer.core.answer_trie import AnswerTrie


def restrict_logits(
    logits: Tensor, restrictions: Mapping[int, tuple[AnswerTrie, Sequence[int]]]
) -> Tensor:
    """Set the logits [N, V] of all tokens that are not allowed to -inf, in place; return them.

    Softmax then renormalizes the probabilities of the allowed tokens.

    Args:
        restrictions: answers and sampled tokens by row. Rows without an entry are not changed, and
            neither are rows whose sampled tokens start no answer. A model whose values are not
            finite can sample such tokens.
    """
    allowed_ids = {
        row: token_ids
        for row, (answers, sampled_ids) in restrictions.items()
        if (token_ids := answers.find_allowed_ids(sampled_ids)) is not None
    }
    if not allowed_ids:
        return logits
    row_numbers = np.fromiter(allowed_ids, dtype=np.int64)
    lengths = [len(token_ids) for token_ids in allowed_ids.values()]
    all_ids = np.concatenate(list(allowed_ids.values())).astype(np.int64)
    rows, indices, columns = (
        torch.from_numpy(numbers).to(logits.device)
        for numbers in (row_numbers, np.repeat(row_numbers, lengths), all_ids)
    )
    allowed_logits = logits[indices, columns]
    logits[rows] = -torch.inf
    logits[indices, columns] = allowed_logits
    return logits
