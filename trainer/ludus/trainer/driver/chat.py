"""A conversation with a model on the terminal (`ludus chat`).

message --> completion --calls?-- no --> the answer is complete
                ^            |
                |           yes --> results of the tools --+
                +------------------------------------------+   at most `max_calls` calls
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import TextIOWrapper

import torch
from transformers import GenerationConfig, PreTrainedModel, TextStreamer

from ludus.env import Message
from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.config import PretrainedModel
from ludus.proto.errors import ActionParseError, ConfigError, LudusError
from ludus.trainer.core.devices import choose_device
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.driver.chat_tools import ChatTools, ToolSettings, check_template, open_tools
from ludus.trainer.driver.evaluated_models import find_model_path, name_model
from ludus.trainer.models import load
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.messages import mark_completion
from ludus.trainer.models.tool_calls import ToolCall
from ludus.trainer.rollout.adapters.tool_adapter import make_refusal
from ludus.trainer.rollout.transcript import cut_text

RESTART_COMMAND = "/new"
"""Input that starts a new conversation."""
_FIELD = "MODEL"
_MAX_SHOWN_CHARS = 1000
"""Maximum number of characters of a call or a result that are shown."""
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
    tools: ChatTools | None = None
    """Tools that the model can call; None if there are none."""
    messages: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.messages = self._make_start()

    def restart(self) -> None:
        """Start a new conversation, with a new episode of the environment."""
        if self.tools is not None:
            self.tools.end_session()
        self.messages = self._make_start()

    def _make_start(self) -> list[Message]:
        system = self.settings.system
        return [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> None:
        """Print the answer to a message while it is sampled, with the calls of tools in between.

        On a terminal, a KeyboardInterrupt ends the answer only, and what was sampled stays in the
        conversation.

        Raises:
            KeyboardInterrupt: standard input is no terminal.
            ConfigError: the conversation is too long for the model, or the template cannot show it.
            EnvError: the environment failed.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        num_calls = 0
        while True:
            printer = self._complete(messages)
            if not printer.token_ids:
                return
            answer = self.tokenizer.decode(printer.token_ids)
            messages.append(mark_completion({"role": "assistant", "content": answer}))
            self.messages = list(messages)
            if self.tools is None or printer.is_interrupted:
                return
            results = self._call_tools(self.tools, answer, printer, num_calls)
            if not results:
                return
            num_calls += len(results)
            messages += results
            self.messages = list(messages)

    def _complete(self, messages: Sequence[Message]) -> _AnswerPrinter:
        """Sample one completion and print its text, except the end that may be a call."""
        tools = self.tools
        prompt = self.tokenizer.encode_whole_prompt(messages, () if tools is None else tools.specs)
        num_tokens = self._count_free_tokens(len(prompt))
        printer = _AnswerPrinter(self.tokenizer, may_call=tools is not None)
        try:
            self._sample(prompt, num_tokens, printer)
        except KeyboardInterrupt:
            printer.end()
            printer.is_interrupted = True
            if not self.is_interactive:
                raise
        finally:
            printer.end_line()
        return printer

    def _call_tools(
        self, tools: ChatTools, answer: str, printer: _AnswerPrinter, num_calls: int
    ) -> list[Message]:
        """Return the results of the calls in an answer; empty if it calls nothing, or too much.

        Args:
            num_calls: number of calls for the current message so far.
        """
        calls: list[ToolCall] = []
        refusals: list[Message] = []
        try:
            calls = tools.read_calls(answer)
        except ActionParseError as error:
            refusals.append(make_refusal(error))
        if not calls and not refusals:
            printer.print_held_text()
            return []
        _print_dimmed(printer.held_text)
        if num_calls + max(len(calls), len(refusals)) > tools.max_calls:
            _print_dimmed(f"not called: the limit is {tools.max_calls} calls for each message")
            return []
        for refusal in refusals:
            _print_dimmed(refusal["content"])
        try:
            return refusals or tools.call_all(calls, _print_dimmed)
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
            return []

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
    """Collects sampled tokens, and prints their text without hidden characters.

    With `may_call`, text is held back from the first sign of a call on.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, may_call: bool) -> None:
        super().__init__(tokenizer.tokenizer, skip_prompt=True)  # type: ignore[arg-type]
        self.token_ids: list[int] = []
        self.held_text = ""
        """Text that may be a call, and that is not printed yet."""
        self.is_interrupted = False
        """True if the user ended the completion."""
        self._call_form = tokenizer.call_form if may_call else None
        self._hidden_ids = tokenizer.end_token_ids
        self._is_prompt = True
        self._printed_text = ""

    def put(self, value: torch.Tensor) -> None:
        """Add tokens. The first call has the prompt."""
        if not self._is_prompt:
            self.token_ids += value.flatten().tolist()
            if self.token_ids[-1] in self._hidden_ids:
                return
        self._is_prompt = False
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of text, or hold it back if it may be a call."""
        whole_text = self._printed_text + self.held_text + text
        num_shown = max(len(self._printed_text), self._find_call(whole_text))
        self._print(whole_text[len(self._printed_text) : num_shown])
        self.held_text = whole_text[num_shown:]

    def end_line(self) -> None:
        """End the printed line. If the user ended the completion, print its held text before."""
        if self.is_interrupted:
            self._print(self.held_text)
            self.held_text = ""
        if self._printed_text or not self.held_text:
            self._print("\n")

    def print_held_text(self) -> None:
        """Print the held text, which is no call, as a line."""
        if self.held_text:
            self._print(f"{self.held_text}\n")

    def _find_call(self, text: str) -> int:
        """Return the index of the first character that may belong to a call."""
        if self._call_form is None:
            return len(text)
        if text.lstrip().startswith(("{", "[")):
            return 0
        return min((start for start, _, _ in self._call_form.find_blocks(text)), default=len(text))

    def _print(self, text: str) -> None:
        self._printed_text += text
        sys.stdout.write(clean_for_terminal(text, keep_newlines=True))
        sys.stdout.flush()


def _print_dimmed(text: str) -> None:
    """Print a call or a result: dimmed on a terminal, otherwise to standard error."""
    shown_text = clean_for_terminal(cut_text(text.strip(), _MAX_SHOWN_CHARS), keep_newlines=True)
    if _is_terminal():
        sys.stdout.write(f"\x1b[2m{shown_text}\x1b[0m\n")
        sys.stdout.flush()
    else:
        sys.stderr.write(f"{shown_text}\n")


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def chat(
    name: str,
    settings: ChatSettings,
    *,
    enable_thinking: bool,
    tool_settings: ToolSettings | None = None,
) -> None:
    """Answer the lines of standard input until it ends.

    Args:
        name: folder of a model or run, or a Hugging Face id.
        tool_settings: environment whose tools the model can call; None for no tools.

    Raises:
        UserError: there is no such model or environment, or it cannot be used.
    """
    path = find_model_path(name, _FIELD)
    is_interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with name_model(name, path, _FIELD):
        tokenizer = ChatTokenizer.load(
            path, PretrainedModel(path=path, enable_thinking=enable_thinking)
        )
        if load.is_reward_model(path):
            raise ConfigError("this is a reward model, which writes no answers")
    with ExitStack() as stack:
        tools = None
        if tool_settings is not None:
            check_template(tokenizer, name)
            tools = stack.enter_context(open_tools(tool_settings, tokenizer, settings.seed))
        with name_model(name, path, _FIELD):
            model = _load_model(path)
        if settings.seed is not None:
            seed_torch(settings.seed, Stream.ANSWER)
        _answer_all(Chat(model, tokenizer, settings, is_interactive, tools))


def _load_model(path: str) -> PreTrainedModel:
    device = choose_device(None)
    # CPUs compute slowly in the types of 16 bits.
    has_gpu = device.type == "cuda"
    model = load.load_language_model(path, "auto" if has_gpu else torch.float32)
    return model.to(device).eval()


def _answer_all(conversation: Chat) -> None:
    """Answer the lines of standard input until it ends."""
    is_interactive = conversation.is_interactive
    if is_interactive:
        sys.stderr.write(f"{_HINT}\n")
        if conversation.tools is not None:
            names = clean_for_terminal(", ".join(conversation.tools.names))
            sys.stderr.write(f"The model can call these tools: {names}.\n")
    while (text := _read_message(is_interactive)) is not None:
        if text == RESTART_COMMAND:
            conversation.restart()
        elif text:
            _answer(conversation, text)


def _answer(conversation: Chat, text: str) -> None:
    try:
        conversation.answer(text)
    except LudusError as error:
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
