"""Renderers: the environment's own one, or the functions that the configuration names."""

from __future__ import annotations

from typing import Any, Protocol

from ludus.env import Message, StepResult
from ludus.proto.config import EnvironmentConfig
from ludus.proto.errors import ActionError, ConfigError, LudusError, UserError
from ludus.trainer.core.functions import import_object
from ludus.trainer.data.failures import describe

NO_PICTURES = (
    "and policies read text only, not the arrays of its observations; give it a text_renderer (for"
    " Gymnasium's pictures, set option picture_columns; for Atari, set obs_type = 'ram')"
)
"""Reason why an environment of pictures cannot be trained on, and the remedy."""


class RendererError(LudusError):
    """`render` or `parse` of the configuration raised, or returned no messages."""


class ChatRenderer(Protocol):
    """Turns results into messages and completions into actions."""

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """Return the messages that this result adds to the conversation."""

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Return keyword arguments of `session.step` for the completion `text`.

        Raises:
            ActionParseError: the text is no action.
        """


class ServerRenderer:
    """The environment's own renderer and parser, which run on the server."""

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """Return the messages that came with the result."""
        if result.text is None:
            reason = f", {NO_PICTURES}" if result.tensors else ""
            raise ConfigError(
                f"the environment shows no text to language models{reason}; set environment.render"
                " and environment.parse to 'module:callable'"
            )
        return result.text.messages

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Return the text unchanged: the server parses it."""
        return {"text": text}


class ImportedRenderer:
    """`render` and `parse` of the run configuration."""

    def __init__(self, render: str, parse: str) -> None:
        self._paths = render, parse
        self._render = import_object(render, "environment.render")
        self._parse = import_object(parse, "environment.parse")

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """Return the messages that `render` returns for the observation.

        Raises:
            RendererError: `render` raised, or returned something else.
        """
        path = f"environment.render = '{self._paths[0]}'"
        try:
            messages = self._render(result.observation, first=first)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RendererError(f"{path} raised {describe(error)}") from error
        if not _are_messages(messages):
            raise RendererError(
                f"{path} must return a list of messages like {{'role': 'user', 'content': "
                f"'...'}}, but it returned {messages!r:.100}"
            )
        return messages

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Return the action that `parse` returns for the text.

        Raises:
            ActionError: the text is no action.
            RendererError: `parse` raised something else.
        """
        try:
            return {"action": self._parse(text, result.observation)}
        except (UserError, ActionError):
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RendererError(
                f"environment.parse = '{self._paths[1]}' raised {describe(error)}; for a text that "
                f"is no action it must raise ActionParseError, and the text was {text[:100]!r}"
            ) from error


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )


def make_renderer(config: EnvironmentConfig) -> ChatRenderer:
    """Return the renderer that the configuration selects."""
    if config.render is None or config.parse is None:
        return ServerRenderer()
    return ImportedRenderer(config.render, config.parse)
