"""The summarization environment of Gymformer's documentation, with three fixes.

The seed selects the article. The limit counts tokens instead of characters. A summary that does not
end within the limit is truncated and has no reward. The reward function is unchanged;
`rewards.summary_reward` explains how a text that is not a summary can get a high reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.env.rewards import summary_reward
from ludus.trainer.compat.gymformer.env.token_env import TokenEnv


@dataclass(frozen=True, slots=True)
class Article:
    """A text and the words that its summary should contain."""

    text: str
    key_terms: tuple[str, ...]


ARTICLES = (
    Article(
        "Scientists have discovered a new species of deep-sea fish...",
        ("species", "fish", "deep-sea", "discovered"),
    ),
    Article(
        "The economic outlook suggests inflation will continue to decrease...",
        ("economic", "inflation", "decrease"),
    ),
)


class SummarizationEnv(TokenEnv):
    """An environment that rewards summaries for brevity and key terms; each step takes one token.

    Args:
        model_name: Hugging Face id or folder of the tokenizer.
        max_generation: maximum number of tokens per summary.
        seed: seed of the first episode if `reset` gets no seed.
        articles: articles to draw from. Default: the two of Gymformer's documentation.
    """

    is_truncated_at_limit = True

    def __init__(
        self,
        model_name: str,
        max_generation: int = 64,
        seed: int = 42,
        articles: Sequence[Article] = ARTICLES,
    ) -> None:
        super().__init__(model_name, max_generation, seed)
        if not articles:
            raise ConfigError("articles must contain at least one article, got none")
        self._articles = tuple(articles)
        self._article = self._articles[0]

    def _start_episode(self, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._article = self._articles[int(self.np_random.integers(len(self._articles)))]
        return make_article_prompt(self._article), {"article": self._article.text}

    def _score(self, answer: str) -> float:
        return summary_reward(answer, self._article.key_terms)


def make_article_prompt(article: Article) -> str:
    """Return the prompt for an article."""
    return f"Article: {article.text}\n\nWrite a concise summary:"
