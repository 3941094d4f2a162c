"""Tests that the chat caches of a rollout worker have bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from ludus.env import Message
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.sized_cache import SizedCache
from ludus.trainer.models.tiny import make_tokenizer

TEXTS = ["hard 16 vs 10", "HIT", "STAND", "soft 18 vs A"] * 5
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(TEXTS, vocab_size=320)


def measure_kept_bytes(function: Callable[[], None]) -> int:
    """Return the number of bytes that remain allocated after the function returns."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def make_prompt(content: str) -> list[Message]:
    """Return a prompt with one user message."""
    return [{"role": "user", "content": content}]


@pytest.mark.slow
def test_long_completions_are_not_cached(tokenizer: PreTrainedTokenizerFast) -> None:
    chat, rng = ChatTokenizer(tokenizer), random.Random(0)

    def decode_many() -> None:
        for _ in range(60):
            # Create new int objects, as an engine does.
            chat.decode([int(str(rng.randrange(260, 300))) for _ in range(4096)])

    assert measure_kept_bytes(decode_many) < MEGABYTE


@pytest.mark.slow
@pytest.mark.parametrize("method", ["encode_first_prompt", "encode_next_prompt"])
def test_cache_of_long_prompts_is_bounded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(ChatTokenizer, "cache_bytes", MEGABYTE)
    chat = ChatTokenizer(tokenizer)
    encode: Callable[[list[Message]], list[int]] = {
        "encode_first_prompt": chat.encode_first_prompt,
        "encode_next_prompt": lambda messages: chat.encode_next_prompt(
            messages, has_end_token=True
        ),
    }[method]

    def encode_many() -> None:
        for index in range(300):
            encode(make_prompt(f"{index} hard 16 vs 10" * 200))

    encode(make_prompt("warm up"))
    assert measure_kept_bytes(encode_many) < 2 * MEGABYTE


def test_repeated_action_is_decoded_once(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatTokenizer(tokenizer)
    token_ids = chat.encode_completion("HIT")
    assert chat.decode(token_ids) == "HIT"
    monkeypatch.setattr(chat.tokenizer, "decode", lambda *_, **__: "decoded again")
    assert chat.decode(token_ids) == "HIT"


def test_cache_evicts_the_least_recently_used_and_stays_bounded() -> None:
    computed_keys: list[str] = []

    def double(key: str) -> str:
        computed_keys.append(key)
        return key * 2

    cache = SizedCache(double, lambda key, value: len(key) + len(value), max_size=12)
    for key in ("aa", "bb", "aa", "cc", "aa", "bb"):
        assert cache(key) == key * 2
        assert cache.size <= 12
    assert computed_keys == ["aa", "bb", "cc", "bb"]


def test_value_larger_than_the_cache_is_computed_but_not_cached() -> None:
    cache = SizedCache(len, lambda key, _: len(key), max_size=3)
    assert [cache("abc"), cache("abcdef"), cache.size] == [3, 6, 3]
