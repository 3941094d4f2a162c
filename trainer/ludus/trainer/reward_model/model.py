"""A reward model: a transformer with a head that outputs one number, and its tokenizer.

    tokens --language model--> hidden states --last token--> head --> score

Rows are padded on the right, so padding does not change the positions of tokens. The last token is
found from the length of the row. The padding token would not do, because it may occur in the text.

    format "chat"   messages --chat template--> text --tokenizer--> tokens
    format "text"   concatenated contents ---------> tokenizer --> tokens

A special token in a content is encoded as text. Only the template and the tokenizer add special
tokens. Token ids are used as they are.

The model's configuration contains the format, so scoring uses the format of the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ludus.env import Message
from ludus.env.types import find_extra_field, format_extra_field_error
from ludus.proto.errors import ConfigError
from ludus.trainer.core.devices import choose_device
from ludus.trainer.core.output import describe_write_error, replace_folder
from ludus.trainer.models.load import load_sequence_classifier, load_tokenizer
from ludus.trainer.models.special_tokens import TextTokenizer
from ludus.trainer.models.template import ChatTemplate

TextFormat = Literal["chat", "text"]
TextContent: TypeAlias = str | Sequence[Message]
Content: TypeAlias = TextContent | Sequence[int]
"""A text, messages, or token ids: the content of a prompt or an answer."""

_FORMAT_KEY = "ludus_format"
"""Key of the text format in the model's config.json."""
_PAD_TOKEN = "<|pad|>"
_DEFAULT_MAX_TOKENS = 1 << 20
"""Maximum number of tokens of a model without a limit of positions."""


class TextEncoder:
    """An encoder of prompts and answers.

    Args:
        max_tokens: maximum number of tokens; longer sequences lose their beginning.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, format: TextFormat, max_tokens: int
    ) -> None:
        self._num_tokens = len(tokenizer)
        self._texts = TextTokenizer(tokenizer)
        self.max_tokens = max_tokens
        self.format = format
        self._template = (
            ChatTemplate(tokenizer, enable_thinking=False) if format == "chat" else None
        )
        self.num_texts_cut = 0
        """Number of sequences that were too long."""

    def encode(self, prompt: Content, answer: Content) -> list[int]:
        """Return the last `max_tokens` tokens of the prompt and the answer."""
        prompt, answer = parse_content(prompt, "a prompt"), parse_content(answer, "an answer")
        if not (prompt or answer):
            raise ConfigError("the prompt and the answer are both empty; give at least one")
        if _is_tokens(prompt) or _is_tokens(answer):
            token_ids = [*self._encode_content(prompt), *self._encode_content(answer)]
            self._check_token_ids(token_ids)
        else:
            text = self._join(cast(TextContent, prompt), cast(TextContent, answer))
            token_ids = self._encode_text(text, adds_special_tokens=self._template is None)
        if not token_ids:
            raise ConfigError("the prompt and the answer have no tokens; give at least one token")
        if len(token_ids) > self.max_tokens:
            self.num_texts_cut += 1
        return token_ids[-self.max_tokens :]

    def _join(self, prompt: TextContent, answer: TextContent) -> str:
        break_specials = self._texts.break_specials
        if self._template is None:
            return break_specials(_join_contents(prompt) + _join_contents(answer))
        messages: list[Message] = [
            {"role": message["role"], "content": break_specials(message["content"])}
            for message in (*_make_messages(prompt, "user"), *_make_messages(answer, "assistant"))
        ]
        return self._template.render(messages, is_prompt=False)

    def _encode_content(self, content: Content) -> Sequence[int]:
        if _is_tokens(content):
            return content
        text = _join_contents(cast(TextContent, content))
        return self._encode_text(self._texts.break_specials(text), adds_special_tokens=False)

    def _encode_text(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        try:
            return self._texts.encode(text, add_special_tokens=adds_special_tokens)
        except TypeError:
            # JSON can contain lone surrogates, which tokenizers reject.
            raise ConfigError(f"the text contains half of a character: {text!r:.60}") from None

    def _check_token_ids(self, token_ids: list[int]) -> None:
        vocab_size = self._num_tokens
        invalid_ids = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if invalid_ids:
            raise ConfigError(
                f"token ids must be below {vocab_size}, the size of the model's vocabulary, got "
                f"{invalid_ids[0]}; leave padding out, or give texts"
            )


class PaddedRows(NamedTuple):
    """Token sequences in one tensor."""

    token_ids: Tensor
    """int64 [N, T], padded on the right."""
    lengths: Tensor
    """int64 [N]"""


class RewardModel(nn.Module):
    """A model that scores texts, and answers to prompts.

    Args:
        max_tokens: maximum number of tokens of a text. Default: the limit of the model.
    """

    def __init__(
        self,
        classifier: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        format: TextFormat,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.tokenizer = tokenizer
        self.head = _find_head(classifier)
        """Layer that computes the score from a hidden state."""
        max_positions = getattr(classifier.config, "max_position_embeddings", None)
        limit = max_positions or _DEFAULT_MAX_TOKENS
        if max_tokens is not None and not 1 <= max_tokens <= limit:
            raise ConfigError(
                f"max_tokens must be from 1 to the model's {limit} positions, got {max_tokens}"
            )
        self.encoder = TextEncoder(tokenizer, format, max_tokens or limit)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.head.weight.device

    def forward(self, rows: PaddedRows) -> Tensor:
        """Return the scores of rows of tokens, float32 [N]."""
        token_ids, lengths = rows.token_ids.to(self.device), rows.lengths.to(self.device)
        positions = torch.arange(token_ids.shape[1], device=self.device)
        mask = (positions < lengths[:, None]).long()
        # In all families of causal models, the base model has no head.
        base_model = self.classifier.base_model
        hidden_states = base_model(input_ids=token_ids, attention_mask=mask).last_hidden_state
        last_states = hidden_states[torch.arange(len(lengths), device=self.device), lengths - 1]
        return self.head(last_states).float().squeeze(-1)

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[Content],
        answers: Sequence[Content],
        *,
        max_tokens_per_batch: int = 16384,
    ) -> list[float]:
        """Return the score of each answer to its prompt.

        Raises:
            ConfigError: the numbers of prompts and answers differ, or a pair is empty.
        """
        if isinstance(prompts, str) or isinstance(answers, str):
            raise ConfigError("prompts and answers must be lists, got a string; pass [text]")
        if len(prompts) != len(answers):
            raise ConfigError(
                f"each answer needs a prompt, got {len(prompts)} prompts and {len(answers)} answers"
            )
        rows = [self.encoder.encode(*pair) for pair in zip(prompts, answers, strict=True)]
        return self.score_tokens(rows, max_tokens_per_batch=max_tokens_per_batch)

    @torch.no_grad()
    def score_tokens(
        self, rows: Sequence[Sequence[int] | np.ndarray], *, max_tokens_per_batch: int = 16384
    ) -> list[float]:
        """Return the scores of rows of tokens.

        Equal rows are scored once, because scores may differ in the last bit between batches. With
        such differences, a group of equal answers would no longer have zero variance.
        """
        was_training = self.training
        self.eval()
        keys = [np.asarray(row, dtype=np.int32).tobytes() for row in rows]
        unique_rows = dict(zip(keys, rows, strict=True))
        sorted_keys = sorted(unique_rows, key=len)
        scores: dict[bytes, float] = {}
        lengths = [len(unique_rows[key]) for key in sorted_keys]
        for indices in split_by_budget(lengths, max_tokens_per_batch):
            batch_keys = [sorted_keys[index] for index in indices]
            batch_scores = self(pad_rows([unique_rows[key] for key in batch_keys])).tolist()
            scores.update(zip(batch_keys, batch_scores, strict=True))
        self.train(was_training)
        return [scores[key] for key in keys]

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder atomically."""
        setattr(self.classifier.config, _FORMAT_KEY, self.encoder.format)
        try:
            with replace_folder(folder) as temporary_folder:
                self.classifier.save_pretrained(temporary_folder)
                self.tokenizer.save_pretrained(temporary_folder)
        except Exception as error:  # safetensors and tokenizers raise many types of errors
            raise ConfigError(
                f"the reward model {describe_write_error(folder, error)}; free some space, or set "
                "output to another folder"
            ) from error


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray]) -> PaddedRows:
    """Return the rows in one tensor. The padding token is arbitrary, because it is masked."""
    lengths = torch.tensor([len(row) for row in rows])
    token_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, padded_row in zip(rows, token_ids, strict=True):
        padded_row[: len(row)] = torch.as_tensor(row)
    return PaddedRows(token_ids, lengths)


def split_by_budget(
    lengths: Sequence[int], max_tokens: int, rows_per_item: int = 1
) -> Iterator[list[int]]:
    """Yield batches of indices of consecutive items, of at most `max_tokens` padded tokens each.

    An item with more tokens is a separate batch.

    Args:
        lengths: length of each item's longest row.
        rows_per_item: number of rows of an item.
    """
    batch_indices: list[int] = []
    max_length = 0
    for index, length in enumerate(lengths):
        new_max_length = max(max_length, length)
        if batch_indices and new_max_length * rows_per_item * (len(batch_indices) + 1) > max_tokens:
            yield batch_indices
            batch_indices, new_max_length = [], length
        batch_indices.append(index)
        max_length = new_max_length
    if batch_indices:
        yield batch_indices


def load_reward_model(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> RewardModel:
    """Load a reward model: a sequence classifier with one label.

    Args:
        path: folder or Hugging Face id.
        device: device of the model. Default: a GPU if there is one.
        max_tokens: maximum number of tokens of a text. Default: the limit of the model.

    Raises:
        NotFoundError: there is no such model.
        ConfigError: the model does not have exactly one output.
    """
    classifier = load_sequence_classifier(path, dtype)
    tokenizer = load_tokenizer(path)
    format = getattr(classifier.config, _FORMAT_KEY, "auto")
    model = RewardModel(
        classifier, tokenizer, format=choose_format(tokenizer, format), max_tokens=max_tokens
    )
    return model.to(choose_device(device)).eval()


def make_reward_model(path: str, format: str, max_tokens: int | None) -> RewardModel:
    """Return an untrained reward model: a causal language model with a random head.

    If the model is a reward model, it keeps its head.
    """
    classifier = load_sequence_classifier(path, torch.float32, allows_new_head=True)
    tokenizer = load_tokenizer(path)
    _set_padding_token(classifier, tokenizer)
    return RewardModel(
        classifier, tokenizer, format=choose_format(tokenizer, format), max_tokens=max_tokens
    )


def choose_format(tokenizer: PreTrainedTokenizerBase, format: str) -> TextFormat:
    """Return the format; "auto" is "chat" if the tokenizer has a chat template."""
    if format == "auto":
        return "text" if tokenizer.chat_template is None else "chat"
    return cast(TextFormat, format)


def parse_content(content: object, name: str) -> Content:
    """Check that a content is a text, messages or token ids, and return it.

    Raises:
        ConfigError: the content is something else.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        if all(isinstance(element, int) and not isinstance(element, bool) for element in content):
            return content
        if all(_is_message(message) for message in content):
            for number, message in enumerate(content):
                if extra_name := find_extra_field(message):
                    raise ConfigError(f"{name}: {format_extra_field_error(extra_name, number)}")
            return [
                Message(role=message["role"], content=message["content"]) for message in content
            ]
    raise ConfigError(
        f"{name} must be a text, a list of messages "
        f'{{"role": ..., "content": ...}}, or a list of token ids, got {content!r:.60}'
    )


def _set_padding_token(classifier: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the model a padding token that differs from the EOS token.

    transformers finds the last token of a text by looking for the padding token.
    """
    if tokenizer.pad_token is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": _PAD_TOKEN})
        if len(tokenizer) > classifier.get_input_embeddings().weight.shape[0]:
            classifier.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    classifier.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.padding_side = "right"


def _find_head(classifier: PreTrainedModel) -> nn.Linear:
    head: Any = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        outputs = f"{head.out_features} outputs" if isinstance(head, nn.Linear) else "no such head"
        raise ConfigError(
            "a reward model needs a head `score` with one output, but "
            f"{type(classifier).__name__} has {outputs}; use a causal model, such as Llama, Qwen "
            "or GPT-2"
        )
    return head


def _is_tokens(content: Content) -> TypeGuard[Sequence[int]]:
    return not isinstance(content, str) and bool(content) and isinstance(content[0], int)


def _join_contents(content: TextContent) -> str:
    if isinstance(content, str):
        return content
    return "".join(message["content"] for message in content)


def _make_messages(content: TextContent, role: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}] if content else []
    return list(content)


def _is_message(content: Any) -> bool:
    return isinstance(content, Mapping) and all(
        isinstance(content.get(name), str) for name in ("role", "content")
    )
