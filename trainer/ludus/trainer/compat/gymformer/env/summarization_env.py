"""Summaries of short articles: the example of Gymformer's document, with its faults mended.

Mended: the seed decides the article; the limit is one of tokens, not of characters; a summary that
does not end within it is cut off (`truncated`), and worth nothing. Its reward is as it was: see
`rewards.summary_reward` for how it can be had without summarising.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.env.rewards import summary_reward
from ludus.trainer.compat.gymformer.env.token_env import Ending, TokenEnv


@dataclass(frozen=True, slots=True)
class Article:
    """A text, and words that a summary of it should hold."""

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
    """A summary of an article, a token a step; rewarded for brevity and key terms.

    Args:
        model_name: Hugging Face id, or folder, of the tokenizer.
        max_generation: tokens of a summary.
        seed: of the first episode, where `reset` has none.
        articles: to draw from; without any, the document's two.
    """

    def __init__(
        self,
        model_name: str,
        max_generation: int = 64,
        seed: int = 42,
        articles: Sequence[Article] = ARTICLES,
    ) -> None:
        super().__init__(model_name, max_generation, seed)
        if not articles:
            raise ConfigError("expected at least one article, got none")
        self._articles = tuple(articles)
        self._article = self._articles[0]

    def _begin(self, seed: int | None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._article = self._articles[int(self.np_random.integers(len(self._articles)))]
        return prompt_of(self._article), {"article": self._article.text}

    def _end(self, answer: str, *, ended: bool) -> Ending:
        reward = summary_reward(answer, self._article.key_terms) if ended else 0.0
        return Ending(reward, is_over=ended)


def prompt_of(article: Article) -> str:
    """What is asked of an article."""
    return f"Article: {article.text}\n\nWrite a concise summary:"
