"""Write articles.jsonl: the two articles of Gymformer's documentation with their key terms.

Each row has example answers of random words. A tiny model learns the words from them, but nothing
about the articles.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from ludus.trainer.compat.gymformer.env.summarization_env import ARTICLES, make_article_prompt
from prompts_env import write_rows

_NUM_EXAMPLES = 64
_MAX_WORDS = 16


def main() -> None:
    """Write the file to the folder of this script."""
    rng = random.Random("examples of summaries")
    words = sorted(
        {word for article in ARTICLES for word in re.findall(r"[a-z-]+", article.text.lower())}
    )
    write_rows(
        {
            "prompt": [make_article_prompt(article) for article in ARTICLES],
            "key_terms": [list(article.key_terms) for article in ARTICLES],
            "examples": [
                [
                    " ".join(rng.choices(words, k=rng.randint(1, _MAX_WORDS)))
                    for _ in range(_NUM_EXAMPLES)
                ]
                for _ in ARTICLES
            ],
        },
        Path(__file__).with_name("articles.jsonl"),
    )


if __name__ == "__main__":
    main()
