"""What a tiny model is asked is cut into the tokens that it was warm-started on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import TinyModel
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer, save

QUESTIONS = [f"{left} + {right} = ?" for left in range(20) for right in range(20)]
ANSWERS = [str(number) for number in range(39)] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows sums, as a run leaves it."""
    tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    config = TinyModel(width=32, num_heads=1, intermediate=32, max_tokens=32)
    path = tmp_path_factory.mktemp("model")
    save(make_model(config, tokenizer, seed=0), tokenizer, path)
    return path


def test_a_saved_tokenizer_comes_back_with_the_same_tokens(folder: Path) -> None:
    made = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    loaded = load_tokenizer(folder)
    for text in (*QUESTIONS, *ANSWERS):
        assert loaded.encode(text) == made.encode(text)


def test_every_number_of_a_sum_is_one_token(folder: Path) -> None:
    loaded = load_tokenizer(folder)
    assert {len(loaded.encode(question)) for question in QUESTIONS} == {5}
    assert {len(loaded.encode(answer)) for answer in ANSWERS} == {1}


def test_a_checkpoint_of_it_keeps_the_tokens(folder: Path, tmp_path: Path) -> None:
    first = load_tokenizer(folder)
    first.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert [again.encode(text) for text in QUESTIONS] == [first.encode(text) for text in QUESTIONS]
