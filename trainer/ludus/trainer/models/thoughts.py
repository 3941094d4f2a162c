"""Thoughts in the text of a completion: everything up to the last </think>.

A thought without an end fills the rest of the text. Some templates open the thought in the prompt,
so that the completion starts inside it (`is_open`).
"""

from __future__ import annotations

THOUGHT_START, THOUGHT_END = "<think>", "</think>"


def strip_reasoning(text: str, *, is_open: bool = False) -> str:
    """Return a completion without its thoughts; empty if the thoughts do not end."""
    return split_reasoning(text, is_open=is_open)[1]


def split_reasoning(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Split a completion into its thoughts, without their tags, and its other text."""
    start = find_thoughts_end(text, is_open=is_open)
    if start == 0:
        return "", text
    thoughts = text[:start].replace(THOUGHT_START, "").replace(THOUGHT_END, "")
    return thoughts.strip(), text[start:].strip()


def find_thoughts_end(text: str, *, is_open: bool = False) -> int:
    """Return the index at which the thoughts end; the length of the text if they do not end."""
    end = text.rfind(THOUGHT_END)
    if end >= 0:
        return end + len(THOUGHT_END)
    return len(text) if is_open or THOUGHT_START in text else 0
