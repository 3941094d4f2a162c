"""Tiny models that have learned the words of a task and the format of an answer, but nothing else.

They replace models such as GPT-2 without a download.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from ludus.proto.config import TinyModel
from ludus.trainer.compat.gymformer.env.cot_env import make_problem_prompt, make_sums
from ludus.trainer.compat.gymformer.env.summarization_env import ARTICLES, make_article_prompt
from ludus.trainer.learner.warm_start import Conversation, Exchange
from ludus.trainer.setup.tiny_model import make_tiny_model

CONFIG = TinyModel(
    width=64,
    num_heads=2,
    intermediate=128,
    max_tokens=256,
    warm_start_layers="all",
    warm_start_learning_rate=3e-3,
    warm_start_epochs=2,
)
_NUM_ANSWERS = 2048


def make_thinker(folder: Path, seed: int = 0) -> str:
    """Make a model that answers sums with random numbers in CoTEnv's tags; return its folder."""
    rng = random.Random("any number")
    problems = rng.choices(make_sums(10), k=_NUM_ANSWERS)
    return _make_model(
        folder,
        seed,
        [
            _make_conversation(
                make_problem_prompt(problem.question),
                f"<think>{problem.question}</think><final_answer>{rng.randrange(10)}</final_answer>",
            )
            for problem in problems
        ],
    )


def make_summarizer(folder: Path, seed: int = 0) -> str:
    """Make a model that writes random words of both articles; return its folder."""
    rng = random.Random("any words")
    words = sorted(
        {word for article in ARTICLES for word in article.text.lower().strip(".").split()}
    )
    return _make_model(
        folder,
        seed,
        [
            _make_conversation(
                make_article_prompt(article), " ".join(rng.choices(words, k=rng.randint(1, 16)))
            )
            for article in rng.choices(ARTICLES, k=_NUM_ANSWERS)
        ],
    )


def make_speaker(folder: Path, prompts: Sequence[str], words: Sequence[str], seed: int = 0) -> str:
    """Make a model that answers the prompts with six random words; return its folder."""
    rng = random.Random("any six words")
    conversations = [
        _make_conversation(rng.choice(prompts), " ".join(rng.choices(words, k=6)))
        for _ in range(_NUM_ANSWERS)
    ]
    return _make_model(folder, seed, conversations)


def _make_conversation(prompt: str, answer: str) -> Conversation:
    return [Exchange([{"role": "user", "content": prompt}], answer)]


def _make_model(folder: Path, seed: int, conversations: Sequence[Conversation]) -> str:
    if not folder.exists():
        make_tiny_model(CONFIG, conversations, seed, folder)
    return str(folder)
