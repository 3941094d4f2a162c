"""Encoding of texts in which special tokens are plain text.

    text --break_specials--> text with a break in each special token --encode--> tokens

A break is a noncharacter of Unicode. The parts between breaks are encoded separately, so that no
part contains a whole special token. Breaks survive a chat template, which adds its own special
tokens around the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # network runs import this module without transformers
    from transformers import PreTrainedTokenizerBase

_BREAK = "\ufdd0"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SAMPLE_TEXT = "a"
"""Text that shows which tokens a tokenizer adds around a text."""


class TextTokenizer:
    """A tokenizer of texts with breaks.

    Args:
        kept_tokens: special tokens that keep their meaning in a text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, kept_tokens: Collection[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        special_tokens = list_special_tokens(tokenizer).difference(kept_tokens)
        splittable = sorted(re.escape(token) for token in special_tokens if len(token) > 1)
        # The lookahead also finds tokens that overlap.
        pattern = rf"(?=(?:{'|'.join(splittable) or '(?!)'}))(.)"
        self._first_characters = re.compile(pattern, re.DOTALL)
        # White space is kept, because texts without it would be of no use.
        characters = {token for token in special_tokens if len(token) == 1}
        unsplittable = {character for character in characters if not character.isspace()}
        self._replacements = str.maketrans(dict.fromkeys({*unsplittable, _BREAK}, _REPLACEMENT))

    def break_specials(self, text: str) -> str:
        """Return the text with a break after the first character of each special token.

        U+FFFD replaces special tokens of one character, which cannot be split, and breaks that the
        text already contains.
        """
        return self._first_characters.sub(rf"\1{_BREAK}", text.translate(self._replacements))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text without its breaks.

        Args:
            add_special_tokens: whether to add the tokens that start and end a text.
        """
        parts = text.split(_BREAK)
        if len(parts) == 1:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        encoded_parts = (self._tokenizer.encode(part, add_special_tokens=False) for part in parts)
        start_ids, end_ids = self._added_ids if add_special_tokens else ([], [])
        return [*start_ids, *chain.from_iterable(encoded_parts), *end_ids]

    @cached_property
    def _added_ids(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer adds before and after a text."""
        token_ids = list(self._tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=True))
        sample_ids = list(self._tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False))
        length = len(sample_ids)
        starts = reversed(range(len(token_ids) - length + 1))
        start = next(start for start in starts if token_ids[start : start + length] == sample_ids)
        return token_ids[:start], token_ids[start + length :]


def list_special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts of all special tokens."""
    added_tokens = tokenizer.added_tokens_decoder.values()
    special_tokens = {str(token) for token in added_tokens if token.special}
    return special_tokens | {*tokenizer.all_special_tokens}
