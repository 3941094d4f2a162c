"""Chat templates: programs that render messages as text.

Templates differ in how a turn ends, in the roles that they refuse, in the form of thoughts and tool
calls, and in whether they list tools. All of this is found out by rendering small conversations.

    messages --form that the template accepts--> text      with calls, unchanged, or merged
    tools    --listed by the template, or by a message--> text

A template may also render a message differently in a longer conversation, or drop it. Such forms
are not used. If no form is left, the conversation is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError, TemplateRuntimeError, TemplateSyntaxError

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.models.messages import (
    MessageForm,
    MessageShape,
    TemplateMessage,
    flatten_messages,
    get_shape,
    list_results,
    make_call_id,
    make_probes,
    make_template_calls,
    merge_into_user,
    merge_neighbors,
)
from ludus.trainer.models.probes import (
    ASSISTANT_MESSAGE,
    PLACEHOLDER,
    PROBE_CALL,
    PROBE_TOOL,
    SYSTEM_MESSAGE,
    THOUGHT,
    THOUGHT_FIELDS,
    TOOL_MESSAGE,
    USER_MESSAGE,
    CallRendering,
    are_in_order,
    format_hermes_call,
    make_sample_call,
    make_tool_list_message,
    read_template,
)
from ludus.trainer.models.thoughts import KNOWN_FORMS, THINK, ThoughtForm
from ludus.trainer.models.tool_calls import (
    CALL_FORMS,
    HERMES,
    CallForm,
    ToolCall,
    ToolSpec,
    find_form,
    has_calls,
)

if TYPE_CHECKING:  # network runs use the text functions of `chat`, without transformers
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

TailRenderer = Callable[[Sequence[Message]], str]
"""A function that renders the messages between two completions."""


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        end_token_ids: tokens that end a completion, from the model's files.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        enable_thinking: bool,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._text = read_template(tokenizer)
        self._enable_thinking = enable_thinking
        self._end_token_ids = frozenset((tokenizer.eos_token_id, *end_token_ids))
        self._find_cached_form = lru_cache(1024)(self._find_form)
        self._find_cached_tail = lru_cache(1024)(self._find_tail)
        self._check_cached_tools = lru_cache(128)(self._check_tools)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, is_prompt: bool = True
    ) -> str:
        """Return the text of a conversation; a prompt ends with the start of a completion.

        Raises:
            ConfigError: the template refuses such a conversation in every form.
        """
        if tools and self.lists_tools:
            self._check_cached_tools(json.dumps(tools))
        elif tools:
            messages, tools = [make_tool_list_message(tools), *messages], ()
        form = self._find_cached_form(get_shape(messages), has_tools=bool(tools))
        try:
            return self._apply(form(messages), tools, is_prompt=is_prompt)
        except TemplateError as error:
            raise self._make_refusal(f"cannot render a conversation: {error}") from error

    def render_next_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text between two completions: the end of the first turn, then `messages`."""
        try:
            return self._find_cached_tail(get_shape(messages))(messages)
        except TemplateError as error:
            raise self._make_refusal(f"cannot continue a conversation: {error}") from error

    @cached_property
    def end_token_id(self) -> int:
        """The token that ends an assistant's turn, or the EOS token if there is none.

        In many models the two differ (Gemma, Phi). In GLM a turn ends with the next role's token.
        """
        _, text_after = self.text_around_completion
        token_id = self.find_special(text_after)
        if token_id is not None:
            return token_id
        with suppress(ConfigError):
            next_token_id = self.find_special(self.render_next_prompt([USER_MESSAGE]))
            if next_token_id in self._end_token_ids:
                assert next_token_id is not None
                return next_token_id
        return int(self._tokenizer.eos_token_id)

    @cached_property
    def ends_turns(self) -> bool:
        """True if the text between two turns starts with the end token."""
        text = self.render_next_prompt([USER_MESSAGE])
        return self.find_special(text) == self.end_token_id

    @cached_property
    def user_header(self) -> str:
        """Text between a completion and the user's next message; empty if it is unknown."""
        with suppress(ConfigError):
            text = self.render_next_prompt([{"role": "user", "content": (content := "user-turn")}])
            header, mark, _ = text.partition(content)
            return header if mark else ""
        return ""

    @cached_property
    def text_around_completion(self) -> tuple[str, str]:
        """Text that the template adds before a completion (not in its prompt), and after it."""
        text = self.render([USER_MESSAGE, ASSISTANT_MESSAGE], is_prompt=False)
        start, separator, text_after = text.rpartition(PLACEHOLDER)
        if not separator:
            raise self._make_refusal("omits the assistant's messages")
        prompt = self.render([USER_MESSAGE])
        # Some prompts open a thought, which the template removes if there is a response.
        return (start[len(prompt) :] if start.startswith(prompt) else ""), text_after

    @cached_property
    def thoughts(self) -> ThoughtForm:
        """The form of thoughts, found in a message with a separate field of thoughts."""
        prompt, field = self.render([USER_MESSAGE]), ""
        text = start_text = between = ""
        for field in THOUGHT_FIELDS:
            message = {**ASSISTANT_MESSAGE, field: THOUGHT}
            with suppress(TemplateError):
                text = self._apply([{**USER_MESSAGE}, message], is_prompt=False)
            start_text, separator, rest = text.partition(THOUGHT)
            between, has_content, _ = rest.partition(PLACEHOLDER)
            if separator and has_content:
                break
        else:
            form = next((form for form in KNOWN_FORMS if form.end in self._text), THINK)
            return replace(form, is_open=prompt.rstrip().endswith(form.start))
        prefix, end = self.text_around_completion[0], between.strip()
        known_start = next((form.start for form in KNOWN_FORMS if form.end == end), "")
        if known_start or end.startswith("</"):
            start = known_start or f"<{end[2:-1]}>"
            return ThoughtForm(start, end, "", prompt.rstrip().endswith(start), field)
        start = start_text[len(prompt) :].strip()
        if not start:  # the prompt ends with the start of a thought
            return ThoughtForm("", end, "", is_open=True, field=field)
        if prefix.strip() and between.endswith(prefix):
            return ThoughtForm(start, between.removesuffix(prefix), prefix, field=field)
        return ThoughtForm(start, end, field=field)

    @cached_property
    def opening(self) -> str:
        """The start of a thought at the end of a prompt, with its white space; may be empty."""
        if not self.thoughts.is_open:
            return ""
        prompt = self.render([USER_MESSAGE])
        return prompt[prompt.rindex(self.thoughts.start) :]

    @cached_property
    def lists_tools(self) -> bool:
        """True if the template shows the tools to the model."""
        try:
            text = self._apply([{**USER_MESSAGE}], [PROBE_TOOL])
        except TemplateError:
            return False
        return PROBE_CALL.name in text

    @cached_property
    def calls(self) -> CallRendering:
        """The way in which the template renders tool calls."""
        unknown = CallRendering(None)
        for empty_content, has_text_arguments in product(("", None), (False, True)):
            rendering = CallRendering(None, "", has_text_arguments, empty_content)
            try:
                text = self._render_calls(rendering, [PROBE_CALL])
            except TemplateError:
                continue
            if PROBE_CALL.name not in text:
                continue
            form = find_form(text, [PROBE_CALL], [PROBE_TOOL])
            if form:
                return replace(rendering, form=form, example=text)
            unknown = unknown if unknown.example else replace(rendering, example=text)
        return unknown

    @property
    def call_form(self) -> CallForm:
        """The form in which completions call tools."""
        if not self.lists_tools:
            return HERMES
        if self.calls.form or self.calls.example:
            return self.calls.form or HERMES
        vocabulary = self._tokenizer.get_vocab()
        return next((form for form in CALL_FORMS if form.marker in vocabulary), HERMES)

    def check_end_token(self) -> None:
        """Check that the end of a thought does not end a completion.

        Raises:
            ConfigError: thoughts and turns end with the same token.
        """
        end_text = self._tokenizer.decode([self.end_token_id])
        if end_text in self.thoughts.end + self.thoughts.answer_start:
            raise self._make_refusal(
                f"ends thoughts and turns with the same token {end_text!r}",
                "use a model whose thoughts and turns end differently",
            )

    def check_turns(self) -> None:
        """Check that appended prompts continue a conversation as the template would.

        Raises:
            ConfigError: the template renders earlier turns differently from the last one.
        """
        user, answer = {**USER_MESSAGE}, {**ASSISTANT_MESSAGE}
        try:
            text = self._apply([user, answer, user, answer, user], ())
        except TemplateError:
            return  # The template cannot continue conversations, which the first prompt reports.
        if text.count(PLACEHOLDER) != 2:
            return
        _, between, tail = text.split(PLACEHOLDER)
        end_text = self._tokenizer.decode([self.end_token_id])
        has_end = self.find_special(self.text_around_completion[1]) is not None
        is_ended = not has_end or tail.lstrip().startswith(end_text)
        if not is_ended or self._normalize(between) != self._normalize(tail):
            raise self._make_refusal(
                "renders the last turn of a conversation differently from earlier turns, so that "
                "no prompt continues the sampled tokens",
                "set model.keep_thinking = false, which renders every prompt as a whole",
            )

    def render_every_role(self) -> str:
        """Return a conversation with the roles that the template accepts."""
        start, end = [USER_MESSAGE, ASSISTANT_MESSAGE], [ASSISTANT_MESSAGE, USER_MESSAGE]
        conversations = (
            [SYSTEM_MESSAGE, *start, TOOL_MESSAGE, *end],
            [*start, USER_MESSAGE],
            [USER_MESSAGE],
        )
        for messages in conversations:
            with suppress(ConfigError):
                return self.render(messages)
        return ""  # The first prompt will raise the error.

    def _normalize(self, text: str) -> str:
        """Return the text between two turns without the marks of thoughts at its end."""
        for mark in (self.thoughts.end, self.thoughts.start, self.thoughts.answer_start):
            text = text.replace(mark, "") if mark else text
        return text.rstrip()

    def find_special(self, text: str) -> int | None:
        """Return the added token at the start of a text; None if there is none.

        Not all models mark the tokens that start and end messages as special.
        """
        for token_id in self._tokenizer.encode(text.lstrip(), add_special_tokens=False)[:1]:
            if token_id in self._tokenizer.added_tokens_decoder:
                return int(token_id)
        return None

    def _list_forms(self, shape: MessageShape) -> list[MessageForm]:
        """Return the forms of messages, the most faithful form first."""
        flatten = partial(flatten_messages, write_calls=self._write_calls)
        forms: list[MessageForm] = [
            flatten,
            lambda messages: merge_neighbors(flatten(messages)),
            lambda messages: merge_into_user(flatten(messages)),
        ]
        if not any(item.names for item in shape):
            forms.insert(0, CallRendering(None).structure)
        elif self.lists_tools and self.calls.form:
            forms.insert(0, self.calls.structure)
        return forms

    def _find_form(self, shape: MessageShape, *, has_tools: bool) -> MessageForm:
        """Return the first form in which the template shows all messages of this shape in order.

        Some templates show a later system message at the start, where no appended prompt has it.
        """
        messages, contents = make_probes(shape)
        reason = "omits or moves the messages of some roles"
        for form in self._list_forms(shape):
            try:
                text = self._apply(form(messages), [PROBE_TOOL] if has_tools else ())
            except TemplateError as error:
                reason = f"reports: {error}"
                continue
            if are_in_order(contents, text):
                return form
        raise self._make_role_refusal(shape, reason)

    def _find_tail(self, shape: MessageShape) -> TailRenderer:
        """Return the first way to render messages of this shape between two completions.

        The text must be the same in a longer conversation.
        """
        messages, contents = make_probes(shape)
        reason = "omits or moves the messages of some roles"
        has_results = bool(shape) and shape[0].role == "tool" and bool(shape[0].names)
        renderers: list[Callable[..., str]] = [
            partial(self._render_tail_after_calls, form)
            if has_results and form == self.calls.structure
            else partial(self._render_tail, form)
            for form in self._list_forms(shape)
        ]
        for renderer in renderers:
            try:
                text = renderer(messages)
                is_stable = not messages or renderer(messages, num_rounds=2) == text
            except TemplateError as error:
                reason = f"reports: {error}"
                continue
            if is_stable and are_in_order(contents, text):
                return renderer
            reason = reason if is_stable else "renders later messages of some roles differently"
        raise self._make_role_refusal(shape, reason)

    def _render_tail(
        self, form: MessageForm, messages: Sequence[Message], num_rounds: int = 1
    ) -> str:
        conversation = form([USER_MESSAGE, *[ASSISTANT_MESSAGE, *messages] * num_rounds])
        _, separator, tail = self._apply(conversation).rpartition(PLACEHOLDER)
        # A form may merge the completion with a message of the assistant that follows.
        if not separator or all(message["content"] != PLACEHOLDER for message in conversation):
            raise TemplateRuntimeError("the assistant's messages are omitted")
        return tail

    def _render_tail_after_calls(
        self, form: MessageForm, messages: Sequence[Message], num_rounds: int = 1
    ) -> str:
        """Return the text after a completion that consists of the calls of the first results."""
        calls = [
            ToolCall(name, {"text": PLACEHOLDER}, call_id)
            for name, call_id in list_results(messages)
        ]
        answer: Any = {"role": "assistant", "content": "", "calls": make_template_calls(calls)}
        conversation = [USER_MESSAGE, *[answer, *messages] * num_rounds]
        call_text = self._render_calls(self.calls, calls)
        assert self.calls.form is not None
        blocks = self.calls.form.find_blocks(call_text)
        if not blocks:
            raise TemplateRuntimeError("the calls have another form")
        call_text = call_text[blocks[0][0] : blocks[-1][1]].strip()
        parts = self._apply(form(conversation), ()).split(call_text)
        if len(parts) != num_rounds + 1:
            raise TemplateRuntimeError("the calls are omitted")
        if not calls[0].id and make_call_id(0) in parts[-1]:
            raise TemplateRuntimeError("a result needs the id that the model gave the call")
        return parts[-1]

    def _render_calls(self, rendering: CallRendering, calls: Sequence[ToolCall]) -> str:
        """Return the text of a completion that consists of calls, without its end."""
        call_message: Any = {
            "role": "assistant",
            "content": "",
            "calls": make_template_calls(calls),
        }
        messages = rendering.structure([USER_MESSAGE, call_message])
        text = self._apply(messages, (), is_prompt=False)
        other_message = {"role": "assistant", "content": "~~~"}
        other_text = self._apply([messages[0], other_message], (), is_prompt=False)
        pairs = zip(text, other_text, strict=False)
        text = text[len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) :]
        ends = [
            index
            for token_id in (*self._end_token_ids, self.end_token_id)
            if (index := text.find(self._tokenizer.decode([token_id]))) > 0
        ]
        return text[: min(ends, default=len(text))]

    def _write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as text for templates that cannot render them."""
        if self.lists_tools and self.calls.form:
            with suppress(TemplateError):
                return "\n".join(self._render_calls(self.calls, [call]).strip() for call in calls)
        return "\n".join(map(format_hermes_call, calls))

    def _check_tools(self, tools_json: str) -> None:
        """Check that completions can call each of the tools that the template lists."""
        if not self.calls.example:
            _log.warning(
                "the chat template of '%s' lists tools but renders no tool calls; calls are "
                "expected in the form %s",
                self._tokenizer.name_or_path,
                self.call_form.name,
            )
            return
        if self.calls.form is None:
            raise self._make_refusal(
                f"writes tool calls in an unknown form, such as {self.calls.example[:200]!r}",
                "use a model whose template writes them in one of the forms "
                f"{', '.join(form.name for form in CALL_FORMS)}, or set model.chat_template",
            )
        for tool in json.loads(tools_json):
            call = make_sample_call(tool)
            text = self._render_calls(self.calls, [call])
            if not has_calls(self.calls.form, text, [call], [tool]):
                raise self._make_refusal(
                    f"writes a call of the tool '{call.name}' as {text[:200]!r}, which cannot be "
                    f"read back in the form {self.calls.form.name}",
                    "rename the tool or its parameters",
                )
        result: Any = {"role": "tool", "name": PROBE_CALL.name, "content": "-"}
        tail = self.render_next_prompt([result]).rstrip()
        if self.thoughts.start and tail.endswith(self.thoughts.start) != self.thoughts.is_open:
            raise self._make_refusal(
                "opens a thought after the result of a tool but not after other messages, or vice "
                "versa",
                "set model.enable_thinking = false, or environment.tools = false",
            )

    def _apply(
        self,
        messages: list[TemplateMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        is_prompt: bool = True,
    ) -> str:
        """Apply the template.

        Raises:
            TemplateError: the template refuses the messages, or fails.
            ConfigError: the template cannot be parsed.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._text,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=is_prompt,
                enable_thinking=self._enable_thinking,
            )
        except TemplateSyntaxError as error:
            raise self._make_refusal(
                f"cannot be parsed: line {error.lineno}: {error.message}",
                "correct it, or set model.chat_template to the file of another template",
            ) from error
        except TemplateError:
            raise
        except Exception as error:  # A template may fail with any of Python's errors.
            raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        return str(text)

    def _make_role_refusal(self, shape: MessageShape, reason: str) -> ConfigError:
        roles = ", ".join(item.role for item in shape)
        return self._make_refusal(f"refuses conversations with the roles {roles}; it {reason}")

    def _make_refusal(self, problem: str, remedy: str = "") -> ConfigError:
        remedy = remedy or "use a model whose template renders whole conversations"
        name = self._tokenizer.name_or_path
        return ConfigError(f"the chat template of '{name}' {problem}; {remedy}")
