"""Writes articles.jsonl: the two articles of Gymformer's document, and their key terms.

Each row has some answers made of words at random: a tiny model learns from them to say words, and
nothing of the articles.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from ludus.trainer.compat.gymformer.env.summarization_env import ARTICLES, make_article_prompt
from prompts_env import write_rows

_NUM_EXAMPLES = 64
_MOST_WORDS = 16


def main() -> None:
    """Write the file beside this one."""
    draw = random.Random("examples of summaries")
    words = sorted({word for one in ARTICLES for word in re.findall(r"[a-z-]+", one.text.lower())})
    write_rows(
        {
            "prompt": [make_article_prompt(one) for one in ARTICLES],
            "key_terms": [list(one.key_terms) for one in ARTICLES],
            "examples": [
                [
                    " ".join(draw.choices(words, k=draw.randint(1, _MOST_WORDS)))
                    for _ in range(_NUM_EXAMPLES)
                ]
                for _ in ARTICLES
            ],
        },
        Path(__file__).with_name("articles.jsonl"),
    )


if __name__ == "__main__":
    main()
