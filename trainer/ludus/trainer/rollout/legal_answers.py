"""The legal answers of an environment's states, as the tokens to which completions are restricted.

    StepResult --text.legal_answers--> texts --check, encode--> tokens with the end token --> trie

An answer is encoded once, as the chat template would write it, and must be the same text again when
its tokens are decoded and its thoughts are removed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ludus.env.types import StepResult
from ludus.proto.errors import ConfigError
from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.models.chat import ChatTokenizer, is_surely_longer
from ludus.trainer.models.sized_cache import SizedCache

MAX_LEGAL_ANSWERS = 1024
"""Maximum number of legal answers of a state. Each sampled token is sent to the learner with all
tokens that were allowed at its position."""
_SETTING = "rollout.constrain = 'legal_answers'"
_MAX_CACHED_TOKENS = 1 << 20
"""Maximum number of tokens of all cached tries, and of all cached answers."""
_MAX_QUOTED_CHARS = 100


class LegalAnswers:
    """The answers that one environment lists, in the tokens of one model."""

    def __init__(self, chat: ChatTokenizer, environment: str, max_completion_tokens: int) -> None:
        """`environment` is the name of the environment in the run, for messages."""
        self._chat = chat
        self._environment = environment
        self._max_tokens = max_completion_tokens
        # States repeat: the same few answers are legal in most of them.
        self._encode_cached = SizedCache(self._encode, _measure, _MAX_CACHED_TOKENS)
        self._make_trie_cached = SizedCache(self._make_trie, self._measure_trie, _MAX_CACHED_TOKENS)

    def make_trie(self, result: StepResult) -> AnswerTrie:
        """Return the legal answers of a state.

        Raises:
            ConfigError: the state has no legal answers or too many, or one cannot be sampled.
        """
        answers = result.text.legal_answers if result.text is not None else []
        check_answers(answers, self._environment)
        return self._make_trie_cached(tuple(answers))

    def _make_trie(self, answers: tuple[str, ...]) -> AnswerTrie:
        return AnswerTrie(map(self._encode_cached, answers))

    def _measure_trie(self, answers: tuple[str, ...], _: AnswerTrie) -> int:
        return sum(len(self._encode_cached(answer)) for answer in answers)

    def _encode(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of an answer, with the end token."""
        if is_surely_longer(len(answer), self._max_tokens):
            raise self._make_length_error(answer, f"{len(answer)} characters")
        chat = self._chat
        token_ids = chat.encode_completion(answer, add_prefix=True)
        if len(token_ids) > self._max_tokens:
            raise self._make_length_error(answer, f"{len(token_ids)} tokens")
        sampled_answer = chat.thoughts.get_answer(chat.decode(token_ids))
        has_end_inside = not chat.end_token_ids.isdisjoint(token_ids[:-1])
        if has_end_inside or sampled_answer.strip() != answer.strip():
            raise ConfigError(
                f"{_SETTING} cannot be used with this model: the legal answer "
                f"{answer[:_MAX_QUOTED_CHARS]!r} of environment '{self._environment}' is read as "
                f"{sampled_answer[:_MAX_QUOTED_CHARS]!r} when its tokens are sampled; use a model "
                "whose chat template starts no thoughts and whose tokenizer keeps the text, or "
                "remove rollout.constrain"
            )
        return tuple(token_ids)

    def _make_length_error(self, answer: str, length: str) -> ConfigError:
        return ConfigError(
            f"{_SETTING} needs room for every legal answer, but the answer "
            f"{answer[:_MAX_QUOTED_CHARS]!r} of environment '{self._environment}' has {length} "
            f"with its end token, which is more than max_completion_tokens = {self._max_tokens}; "
            "raise rollout.max_completion_tokens"
        )


def check_answers(answers: Sequence[str], environment: str) -> None:
    """Check that a state of an environment lists some legal answers, and not too many.

    Raises:
        ConfigError: there are none or too many.
    """
    if not answers:
        raise ConfigError(
            f"{_SETTING} needs the legal answers of every state, but environment '{environment}' "
            "lists none in a state where the policy must answer; list them in legal_answers of its "
            "text_renderer, or remove rollout.constrain"
        )
    if len(answers) > MAX_LEGAL_ANSWERS:
        raise ConfigError(
            f"{_SETTING} is possible for at most {MAX_LEGAL_ANSWERS} legal answers, but "
            f"environment '{environment}' lists {len(answers)} in a state; remove rollout.constrain"
        )


def _measure(_: str, token_ids: tuple[int, ...]) -> int:
    return len(token_ids)
