"""Write requests.jsonl: requests for e-mails, with example e-mails of every quality.

A tiny model learns the format of e-mails from `examples`, good and bad ones, but not the reward
rule.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from prompts_env import write_rows

_NAMES = ("Kim", "Ana", "Raj", "Zoe")
_TOPICS = ("invoice", "meeting", "order", "refund")
_MAX_WORDS = 12


def make_letters(name: str, topic: str) -> list[str]:
    """Return all combinations of openings, middles and endings; the first is the ideal."""
    openings = (f"Dear {name},", "Hello,")
    middles = (f"your {topic} is ready.", "all is ready.", f"your {topic} is ready." + " truly" * 9)
    endings = ("Best regards,\nSam", "Bye")
    return ["\n".join(lines) for lines in product(openings, middles, endings)]


def main() -> None:
    """Write the file to the folder of this script."""
    pairs = list(product(_NAMES, _TOPICS))
    write_rows(
        {
            "prompt": [f"Tell {name} that the {topic} is ready." for name, topic in pairs],
            "recipient": [name for name, _ in pairs],
            "keyword": [topic for _, topic in pairs],
            "ideal": [make_letters(name, topic)[0] for name, topic in pairs],
            "max_words": [_MAX_WORDS] * len(pairs),
            "examples": [make_letters(name, topic) for name, topic in pairs],
        },
        Path(__file__).with_name("requests.jsonl"),
    )


if __name__ == "__main__":
    main()
