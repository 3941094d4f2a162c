"""Tiny models that know the words of a task and the form of an answer, and nothing else.

They stand in for GPT-2 and its like where nothing is to be downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from ludus.proto.config import TinyModel
from ludus.trainer.compat.gymformer.env.cot_env import make_problem_prompt
from ludus.trainer.compat.gymformer.env.problems import sums_below
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


def thinker(folder: Path, seed: int = 0) -> str:
    """The folder of a model that answers sums with any number, between the tags of CoTEnv."""
    draw = random.Random("any number")
    problems = draw.choices(sums_below(10), k=_NUM_ANSWERS)
    return _made(
        folder,
        seed,
        [
            _said(
                make_problem_prompt(one.question),
                f"<think>{one.question}</think><final_answer>{draw.randrange(10)}</final_answer>",
            )
            for one in problems
        ],
    )


def summarizer(folder: Path, seed: int = 0) -> str:
    """The folder of a model that says words of both articles at random."""
    draw = random.Random("any words")
    words = sorted({word for one in ARTICLES for word in one.text.lower().strip(".").split()})
    return _made(
        folder,
        seed,
        [
            _said(
                make_article_prompt(article), " ".join(draw.choices(words, k=draw.randint(1, 16)))
            )
            for article in draw.choices(ARTICLES, k=_NUM_ANSWERS)
        ],
    )


def speaker(folder: Path, prompts: Sequence[str], words: Sequence[str], seed: int = 0) -> str:
    """The folder of a model that answers the prompts with six of the words at random."""
    draw = random.Random("any six words")
    answered = [
        _said(draw.choice(prompts), " ".join(draw.choices(words, k=6))) for _ in range(_NUM_ANSWERS)
    ]
    return _made(folder, seed, answered)


def _said(prompt: str, answer: str) -> Conversation:
    return [Exchange([{"role": "user", "content": prompt}], answer)]


def _made(folder: Path, seed: int, conversations: Sequence[Conversation]) -> str:
    if not folder.exists():
        make_tiny_model(CONFIG, conversations, seed, folder)
    return str(folder)
