"""Encoding of texts in which special tokens are plain text.

    text --break_specials--> text with a break in each special token --encode--> tokens

A break is a noncharacter of Unicode. The parts between breaks are encoded separately, so that no
part contains a whole special token. Breaks survive a chat template, which adds its own special
tokens around the text.

The normalizer of a tokenizer may turn other characters into a special token, such as letters of
full width. For such a tokenizer, each text is encoded a second time to find these tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # network runs import this module without transformers
    from transformers import PreTrainedTokenizerBase

BREAK = "\ufdd0"
"""Mark between the parts of a text. No text from outside contains it after `break_specials`."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SAMPLE_TEXT = "a"
"""Text that shows which tokens a tokenizer adds around a text."""


class TextTokenizer:
    """A tokenizer of texts with breaks.

    Args:
        kept_tokens: special tokens that keep their meaning in a text.
        further_tokens: other tokens that are plain text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kept_tokens: Collection[str] = (),
        further_tokens: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        special_tokens = list_special_tokens(tokenizer).difference(kept_tokens)
        special_tokens |= {*further_tokens}
        splittable = sorted(re.escape(token) for token in special_tokens if len(token) > 1)
        # The lookahead also finds tokens that overlap.
        pattern = rf"(?=(?:{'|'.join(splittable) or '(?!)'}))(.)"
        self._first_characters = re.compile(pattern, re.DOTALL)
        # White space is kept, because texts without it would be of no use.
        characters = {token for token in special_tokens if len(token) == 1}
        unsplittable = {character for character in characters if not character.isspace()}
        self._replacements = str.maketrans(dict.fromkeys({*unsplittable, BREAK}, _REPLACEMENT))
        self._normalized_ids = _list_normalized_ids(tokenizer).difference(
            tokenizer.convert_tokens_to_ids(list(kept_tokens))
        )

    def break_specials(self, text: str) -> str:
        """Return the text with a break after the first character of each special token.

        U+FFFD replaces special tokens of one character, which cannot be split, and breaks that the
        text already contains.
        """
        text = self._first_characters.sub(rf"\1{BREAK}", text.translate(self._replacements))
        if not self._normalized_ids:
            return text
        return BREAK.join(map(self._break_normalized, text.split(BREAK)))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text without its breaks.

        Args:
            add_special_tokens: whether to add the tokens that start and end a text.
        """
        parts = text.split(BREAK)
        if len(parts) == 1:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        encoded_parts = (self._tokenizer.encode(part, add_special_tokens=False) for part in parts)
        start_ids, end_ids = self._added_ids if add_special_tokens else ([], [])
        return [*start_ids, *chain.from_iterable(encoded_parts), *end_ids]

    def _break_normalized(self, part: str) -> str:
        """Return a part of a text with a break in what the normalizer turns into special tokens."""
        encoding = self._tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
        spans = [
            (start, end)
            for token_id, (start, end) in zip(
                encoding["input_ids"], encoding["offset_mapping"], strict=True
            )
            if token_id in self._normalized_ids and not part[start:end].isspace()
        ]
        if not spans:
            return part
        pieces, previous_end = [], 0
        for start, end in spans:
            # The middle, because white space may belong to the token.
            middle = (start + end) // 2
            is_splittable = start < middle
            pieces.append(part[previous_end : middle if is_splittable else start])
            pieces.append(BREAK if is_splittable else _REPLACEMENT)
            previous_end = middle if is_splittable else end
        broken_text = "".join([*pieces, part[previous_end:]])
        return BREAK.join(map(self._break_normalized, broken_text.split(BREAK)))

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


def _list_normalized_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens that the tokenizer looks for in normalized texts."""
    if not tokenizer.is_fast or tokenizer.backend_tokenizer.normalizer is None:
        return set()
    # The token for unknown characters is also the result of ordinary texts.
    return {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.normalized and token_id != tokenizer.unk_token_id
    }
