"""The tokens that a completion may contain if it must be one of several answers.

    H IT <end>          prefix      allowed
    H OLD <end>   -->   -           H S
    S TAND <end>        H           IT OLD
                        S           TAND
                        H IT        <end>

Each answer has one sequence of tokens. So the sampled tokens alone determine which tokens may
follow, and every engine and the learner restrict a position to the same tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ludus.trainer.core.ragged import RaggedArray


class AnswerTrie:
    """A prefix tree of the token sequences of all answers, each with its end token."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        """`sequences` are the tokens of the answers. None of them is a prefix of another."""
        next_ids: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for sequence in sequences:
            for position, token_id in enumerate(sequence):
                next_ids[tuple(sequence[:position])].add(token_id)
        self._allowed_ids = {
            prefix: np.array(sorted(token_ids), dtype=np.int32)
            for prefix, token_ids in next_ids.items()
        }

    def find_allowed_ids(self, prefix_ids: Sequence[int]) -> NDArray[np.int32] | None:
        """Return the tokens that may follow `prefix_ids`, the sampled tokens so far.

        The result is None if no answer is longer than these tokens and starts with them.
        """
        return self._allowed_ids.get(tuple(prefix_ids))

    def find_forced_ids(self, prefix_ids: Sequence[int]) -> list[int]:
        """Return the tokens that complete the answer, if only one answer starts with the prefix.

        The result is empty if several answers do, or none, or if the answer is complete.
        """
        token_ids = list(prefix_ids)
        while (allowed_ids := self.find_allowed_ids(token_ids)) is not None:
            if len(allowed_ids) > 1:
                return []
            token_ids.append(int(allowed_ids[0]))
        return token_ids[len(prefix_ids) :]

    def list_allowed_ids(self, token_ids: Sequence[int]) -> RaggedArray:
        """Return int32 arrays of the tokens that were allowed at each position of a completion.

        Raises:
            ValueError: the completion contains a token that was not allowed.
        """
        rows: list[NDArray[np.int32]] = []
        for position, token_id in enumerate(token_ids):
            allowed_ids = self.find_allowed_ids(token_ids[:position])
            if allowed_ids is None or token_id not in allowed_ids:
                choices = [] if allowed_ids is None else allowed_ids.tolist()
                raise ValueError(
                    f"the engine sampled token {token_id} at position {position} of a completion "
                    f"that must be a legal answer, which continues there with {choices!r:.200}"
                )
            rows.append(allowed_ids)
        return RaggedArray.from_rows(rows, np.int32)
