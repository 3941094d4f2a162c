"""A conversation with a model on the terminal (`ludus chat`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import cast

import torch
from transformers import GenerationConfig, PreTrainedModel, TextStreamer

from ludus.env import Message
from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.config import PretrainedModel
from ludus.proto.errors import ConfigError
from ludus.trainer.core.devices import choose_device
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.driver.evaluated_models import find_model_path, name_model
from ludus.trainer.models import load
from ludus.trainer.models.chat import ChatTokenizer

RESTART_COMMAND = "/new"
"""Input that starts a new conversation."""
_FIELD = "MODEL"
_HINT = f"Enter a message. {RESTART_COMMAND} starts again, Ctrl-C ends an answer, Ctrl-D the chat."


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Sampling settings of a conversation."""

    system: str | None
    """System message; None for the template's own, if it has one."""
    temperature: float
    """0 takes the most likely token."""
    max_completion_tokens: int
    seed: int | None


@dataclass(slots=True)
class Chat:
    """A conversation with a loaded model."""

    model: PreTrainedModel
    tokenizer: ChatTokenizer
    settings: ChatSettings
    is_interactive: bool
    messages: list[Message] = field(default_factory=list)

    def restart(self) -> None:
        """Start a new conversation."""
        system = self.settings.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> None:
        """Print the answer to a message while it is sampled.

        On a terminal, a KeyboardInterrupt ends the answer only, and what was sampled stays in the
        conversation.

        Raises:
            KeyboardInterrupt: standard input is no terminal.
            ConfigError: the conversation is too long for the model, or the template cannot show it.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.encode_whole_prompt(messages)
        num_tokens = self._count_free_tokens(len(prompt))
        printer = _AnswerPrinter(self.tokenizer)
        try:
            self._sample(prompt, num_tokens, printer)
        except KeyboardInterrupt:
            printer.end()
            if not self.is_interactive:
                raise
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if not printer.token_ids:
            return
        answer = self.tokenizer.decode(printer.token_ids)
        sampled = {"role": "assistant", "content": answer, "text": answer}
        self.messages = [*messages, cast("Message", sampled)]

    def _sample(self, prompt: list[int], num_tokens: int, printer: _AnswerPrinter) -> None:
        prompt_ids = torch.tensor([prompt], device=self.model.device)
        temperature = self.settings.temperature
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        # Filters and penalties of the model's own settings are off, as in training.
        self.model.generation_config = GenerationConfig(
            do_sample=temperature > 0,
            max_new_tokens=num_tokens,
            eos_token_id=sorted(self.tokenizer.end_token_ids),
            pad_token_id=self.tokenizer.end_token_id,
            **sampling,
        )
        mask = torch.ones_like(prompt_ids)
        self.model.generate(prompt_ids, attention_mask=mask, streamer=printer)

    def _count_free_tokens(self, num_prompt_tokens: int) -> int:
        """Return the maximum number of tokens of an answer."""
        max_tokens = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if max_tokens is None:
            return self.settings.max_completion_tokens
        num_free = max_tokens - num_prompt_tokens
        if num_free < 1:
            raise ConfigError(
                f"the conversation has {num_prompt_tokens:,} tokens, but the model reads at most "
                f"{max_tokens:,}; start a new one with {RESTART_COMMAND}"
            )
        return min(self.settings.max_completion_tokens, num_free)


class _AnswerPrinter(TextStreamer):
    """Collects sampled tokens, and prints their text without hidden characters."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer.tokenizer, skip_prompt=True)  # type: ignore[arg-type]
        self.token_ids: list[int] = []
        self._hidden_ids = tokenizer.end_token_ids
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Add tokens. The first call has the prompt."""
        if not self._is_prompt:
            self.token_ids += value.flatten().tolist()
            if self.token_ids[-1] in self._hidden_ids:
                return
        self._is_prompt = False
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of text."""
        sys.stdout.write(clean_for_terminal(text, keep_newlines=True))
        sys.stdout.flush()


def chat(name: str, settings: ChatSettings, *, enable_thinking: bool) -> None:
    """Answer the lines of standard input until it ends.

    Args:
        name: folder of a model or run, or a Hugging Face id.

    Raises:
        UserError: there is no such model, or it cannot be used.
    """
    path = find_model_path(name, _FIELD)
    is_interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with name_model(name, path, _FIELD):
        tokenizer = ChatTokenizer.load(
            path, PretrainedModel(path=path, enable_thinking=enable_thinking)
        )
        device = choose_device(None)
        if load.is_reward_model(path):
            raise ConfigError("this is a reward model, which writes no answers")
        # CPUs compute slowly in the types of 16 bits.
        has_gpu = device.type == "cuda"
        model = load.load_language_model(path, "auto" if has_gpu else torch.float32)
        model.to(device).eval()
    if settings.seed is not None:
        seed_torch(settings.seed, Stream.ANSWER)
    conversation = Chat(model, tokenizer, settings, is_interactive)
    conversation.restart()
    if is_interactive:
        sys.stderr.write(f"{_HINT}\n")
    while (text := _read_message(is_interactive)) is not None:
        if text == RESTART_COMMAND:
            conversation.restart()
        elif text:
            _answer(conversation, text)


def _answer(conversation: Chat, text: str) -> None:
    try:
        conversation.answer(text)
    except ConfigError as error:
        if not conversation.is_interactive:
            raise
        warn_user(str(error))


def _read_message(is_interactive: bool) -> str | None:
    """Return the next line without spaces around it; None at the end."""
    if not is_interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401  (lets the user edit the line)

    try:
        return input("\n> ").strip()
    except EOFError:
        sys.stdout.write("\n")
        return None
