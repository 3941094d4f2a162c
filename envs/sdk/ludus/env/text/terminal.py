r"""Text of other programs, made safe for terminals and logs.

    "\x1b]0;title\x07 ok\u202e"  --clean_for_terminal-->  r"\x1b]0;title\x07 ok\u202e"

A terminal executes control characters, and bidirectional controls reorder what a reader sees.
Models, environments and servers choose the texts that commands print, so every such text is
cleaned. A newline in a log record would forge a second record.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable
from typing import Any, Final

_HIDDEN_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of controls, format characters, separators, and codes without a character."""
_UNUSUAL_CHARACTERS = re.compile(r"[^ -~]+")
_UNUSUAL_CHARACTERS_IN_LINES = re.compile(r"[^ -~\n\t]+")
_MARK_CATEGORIES: Final = frozenset({"Me", "Mn"})
_MAX_MARKS: Final = 8
"""Maximum number of marks on one letter. More marks cover the lines above and below."""
# Letters, marks and symbols that are drawn as nothing. U+FE0E and U+FE0F, which select the form of
# a symbol, are usual in ordinary text.
_INVISIBLE_CHARACTER = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0d\uffa0"
    "\U000e0100-\U000e01ef]"
)
_MAX_LINE_CHARS: Final = 16_384
_MAX_TRACEBACK_CHARS: Final = 65_536
_LINE_START = re.compile(r"\n(?![ \t]|$)")


def clean_for_terminal(text: str, *, keep_newlines: bool = False) -> str:
    r"""Return the text with every hidden character as a visible escape, for example `\x1b`.

    Hidden are control and format characters, bidirectional controls, line and paragraph
    separators, surrogates, and characters that are drawn as nothing. Marks that cover other lines
    become escapes, too. Cleaning a clean text changes nothing.

    Args:
        keep_newlines: whether newlines and tabs are kept. Default: they are escaped, too.
    """
    pattern = _UNUSUAL_CHARACTERS_IN_LINES if keep_newlines else _UNUSUAL_CHARACTERS
    return pattern.sub(lambda match: _escape_hidden(match.group(), _escape), text)


def clean_json_for_terminal(json_text: str) -> str:
    r"""Return JSON of the same value, in which hidden characters are JSON's escapes."""
    return _UNUSUAL_CHARACTERS_IN_LINES.sub(
        lambda match: _escape_hidden(match.group(), _escape_as_json), json_text
    )


def format_notice(label: str, message: object) -> str:
    """Return `label: message` for standard error, with the message's further lines indented.

    A further line therefore cannot look like another notice.
    """
    cleaned_text = clean_for_terminal(str(message), keep_newlines=True)
    return _LINE_START.sub("\n  ", f"{label}: {cleaned_text}")


class LogFormatter(logging.Formatter):
    """A format in which each record is one line, followed only by an indented traceback.

    Both are cut at a maximum length, because the message of an error can have any length.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        return clean_for_terminal(_cut(super().formatMessage(record), _MAX_LINE_CHARS))

    def formatException(self, ei: Any) -> str:
        """Return the traceback, unless the error's class fails when it is shown."""
        try:
            return super().formatException(ei)
        except Exception as error:  # noqa: BLE001 - code of the class
            return f"the error cannot be shown ({type(error).__name__})"

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line and its traceback."""
        line, newline, traceback = super().format(record).partition("\n")
        traceback = _cut(traceback, _MAX_TRACEBACK_CHARS)
        cleaned_traceback = clean_for_terminal(traceback, keep_newlines=True)
        return line + newline + "\n".join(f"    {part}" for part in cleaned_traceback.splitlines())


def log_to_stderr(level: int) -> None:
    """Log to standard error, unless the program has configured logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def _cut(text: str, max_chars: int) -> str:
    num_cut = len(text) - max_chars
    return text if num_cut <= 0 else f"{text[:max_chars]}... ({num_cut} more characters)"


def _escape_hidden(text: str, escape: Callable[[str], str]) -> str:
    shown_characters, num_marks = [], 0
    for character in text:
        category = unicodedata.category(character)
        num_marks = num_marks + 1 if category in _MARK_CATEGORIES else 0
        is_hidden = category in _HIDDEN_CATEGORIES or num_marks > _MAX_MARKS
        if is_hidden or _INVISIBLE_CHARACTER.match(character) is not None:
            character = escape(character)
        shown_characters.append(character)
    return "".join(shown_characters)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _escape_as_json(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[index : index + 2].hex()}" for index in range(0, len(units), 2))
