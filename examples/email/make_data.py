"""Writes requests.jsonl: what to write to whom, and letters of every quality.

A tiny model learns from `examples` how letters look, good and bad ones, and nothing of what the
rule asks for.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from prompts_env import write_rows

_NAMES = ("Kim", "Ana", "Raj", "Zoe")
_ABOUT = ("invoice", "meeting", "order", "refund")
_MAX_WORDS = 12


def letters(name: str, about: str) -> list[str]:
    """Every way to begin, go on and end, one of which is the ideal."""
    beginnings = (f"Dear {name},", "Hello,")
    middles = (f"your {about} is ready.", "all is ready.", f"your {about} is ready." + " truly" * 9)
    ends = ("Best regards,\nSam", "Bye")
    return ["\n".join(parts) for parts in product(beginnings, middles, ends)]


def main() -> None:
    """Write the file beside this one."""
    pairs = list(product(_NAMES, _ABOUT))
    write_rows(
        {
            "prompt": [f"Tell {name} that the {about} is ready." for name, about in pairs],
            "recipient": [name for name, _ in pairs],
            "keyword": [about for _, about in pairs],
            "ideal": [letters(name, about)[0] for name, about in pairs],
            "max_words": [_MAX_WORDS] * len(pairs),
            "examples": [letters(name, about) for name, about in pairs],
        },
        Path(__file__).with_name("requests.jsonl"),
    )


if __name__ == "__main__":
    main()
