"""A reward model: a transformer with a head of one number, and the tokenizer it reads with.

    tokens --language model--> hidden state of each --at the last token--> head --> score

Rows are padded on the right, so a token has the position that it has alone; the state is taken
at the last token of the row by its length, and not by the padding token, which may be a token of
the text, too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ludus.proto.errors import ConfigError
from ludus.trainer.core.disk import describe_write_error, replace_folder
from ludus.trainer.models.load import load_sequence_classifier, load_tokenizer
from ludus.trainer.reward_model.batches import Padded, pad, within_budget
from ludus.trainer.reward_model.preferences import Said
from ludus.trainer.reward_model.texts import Format, Texts, format_for

_log = logging.getLogger(__name__)

_FORMAT_KEY = "ludus_format"
"""In the model's config.json."""
_PAD_TOKEN = "<|pad|>"
_MOST_TOKENS = 1 << 20
"""Of a model that names no limit."""


class RewardModel(nn.Module):
    """Scores of texts, and of answers to prompts."""

    def __init__(
        self,
        classifier: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        format: Format,
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens` of a text; None is what the model takes.

        Raises:
            ConfigError: it has no head of one number.
        """
        super().__init__()
        self.classifier = classifier
        self.tokenizer = tokenizer
        self._head = _head_of(classifier)
        limit = getattr(classifier.config, "max_position_embeddings", None) or _MOST_TOKENS
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens = {max_tokens} expected 1 or more")
        if max_tokens is not None and max_tokens > limit:
            raise ConfigError(
                f"max_tokens = {max_tokens} is more than the model's {limit} positions; lower it"
            )
        self.texts = Texts(tokenizer, format, max_tokens or limit)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._head.weight.device

    @property
    def head(self) -> nn.Linear:
        """What makes a score of a hidden state."""
        return self._head

    def forward(self, rows: Padded) -> Tensor:
        """float32 [N] the scores of rows of tokens."""
        token_ids, lengths = rows.token_ids.to(self.device), rows.lengths.to(self.device)
        positions = torch.arange(token_ids.shape[1], device=self.device)
        mask = (positions < lengths[:, None]).long()
        # What a causal model has below any head says the same in all families.
        body = self.classifier.base_model
        hidden = body(input_ids=token_ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(lengths), device=self.device), lengths - 1]
        return self._head(last).float().squeeze(-1)

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[Said],
        answers: Sequence[Said],
        *,
        max_tokens_per_batch: int = 16384,
    ) -> list[float]:
        """The score of each answer to its prompt: texts, or lists of messages.

        Args:
            max_tokens_per_batch: padded tokens that go through the model at once.

        Raises:
            ConfigError: as many prompts as answers were expected, or one is empty.
        """
        if isinstance(prompts, str) or isinstance(answers, str):
            raise ConfigError("expected lists of prompts and answers, got a text; write [text]")
        if len(prompts) != len(answers):
            raise ConfigError(
                f"expected a prompt for each answer, got {len(prompts)} and {len(answers)}"
            )
        rows = [self.texts.encode(*pair) for pair in zip(prompts, answers, strict=True)]
        return self.score_tokens(rows, max_tokens_per_batch=max_tokens_per_batch)

    @torch.no_grad()
    def score_tokens(
        self, rows: Sequence[Sequence[int] | np.ndarray], *, max_tokens_per_batch: int = 16384
    ) -> list[float]:
        """The scores of rows of tokens, batched by length.

        Equal rows are computed once: beside other rows their scores might differ in the last bit,
        and a group of equal answers would be taken for one of which something can be learned.
        """
        was_training = self.training
        self.eval()
        keys = [np.asarray(row, dtype=np.int32).tobytes() for row in rows]
        different = dict(zip(keys, rows, strict=True))
        by_length = sorted(different, key=len)
        scores: dict[bytes, float] = {}
        lengths = [len(different[key]) for key in by_length]
        for places in within_budget(lengths, max_tokens_per_batch):
            asked = [by_length[place] for place in places]
            found = self(pad([different[key] for key in asked])).tolist()
            scores.update(zip(asked, found, strict=True))
        self.train(was_training)
        return [scores[key] for key in keys]

    def save(self, folder: Path) -> None:
        """Write a folder that any Hugging Face loader reads, whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        setattr(self.classifier.config, _FORMAT_KEY, self.texts.format)
        try:
            with replace_folder(folder) as aside:
                self.classifier.save_pretrained(aside)
                self.tokenizer.save_pretrained(aside)
        except Exception as error:  # what writes in Rust raises classes of its own, or none
            raise ConfigError(
                f"the reward model {describe_write_error(folder, error)}; make room, or set output "
                "to a folder that has enough"
            ) from error


def load_reward_model(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> RewardModel:
    """The reward model of a folder, or of a Hugging Face id: a sequence classifier of one label.

    Args:
        device: None takes a GPU where there is one.
        max_tokens: of a text; None is what the model takes.

    Raises:
        NotFoundError: there is none.
        ConfigError: it says more than one number.
    """
    classifier = load_sequence_classifier(path, dtype)
    tokenizer = load_tokenizer(path)
    wanted = getattr(classifier.config, _FORMAT_KEY, "auto")
    model = RewardModel(
        classifier, tokenizer, format=format_for(tokenizer, wanted), max_tokens=max_tokens
    )
    return model.to(chosen_device(device)).eval()


def begin_reward_model(path: str, format: str, max_tokens: int | None) -> RewardModel:
    """A reward model to train, made of a causal language model: its head is random.

    One that is a reward model already keeps its head.

    Raises:
        NotFoundError: there is no model.
        ConfigError: it cannot be read as the format says.
    """
    classifier = load_sequence_classifier(path, torch.float32, new_head=True)
    tokenizer = load_tokenizer(path)
    _take_padding(classifier, tokenizer)
    return RewardModel(
        classifier, tokenizer, format=format_for(tokenizer, format), max_tokens=max_tokens
    )


def chosen_device(name: str | torch.device | None) -> torch.device:
    """The device of that name; where none is named a GPU, if there is one.

    Raises:
        ConfigError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device = '{name}' cannot be used: {reason}; expected 'cpu', or a GPU of this "
            f"machine, which has {torch.cuda.device_count()}"
        ) from error


def _take_padding(classifier: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the model a padding token that ends no text.

    Whoever loads the folder with transformers alone finds the last token of a text by it.
    """
    if tokenizer.pad_token is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": _PAD_TOKEN})
        if len(tokenizer) > classifier.get_input_embeddings().weight.shape[0]:
            classifier.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    classifier.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.padding_side = "right"


def _head_of(classifier: PreTrainedModel) -> nn.Linear:
    head: Any = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        kind = type(classifier).__name__
        what = f"one of {head.out_features}" if isinstance(head, nn.Linear) else "none"
        raise ConfigError(
            f"expected a causal model with a head `score` of one number, got {what} in {kind}; "
            "take a model of a causal family, such as Llama, Qwen or GPT-2"
        )
    return head
