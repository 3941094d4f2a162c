"""How the policy sees the environment: its own text renderer, or one named in the configuration."""

from __future__ import annotations

from typing import Any, Protocol

from ludus.env import Message, StepResult
from ludus.proto.config import EnvironmentConfig
from ludus.proto.errors import ActionError, ConfigError, LudusError, UserError
from ludus.trainer.core.functions import import_object
from ludus.trainer.data.failures import describe

NO_PICTURES = (
    "and of its observation's arrays no policy sees anything: policies read text alone; give it a"
    " text_renderer (of Gymnasium's pictures, option picture_columns draws one; of Atari's,"
    " obs_type = 'ram' gives numbers)"
)
"""Why an environment of pictures cannot be trained on as it is, and the way out."""


class RendererError(LudusError):
    """The run's own `render` or `parse` raised, or returned no messages."""


class ChatRenderer(Protocol):
    """Turns results into messages and answers into calls."""

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """The messages this result adds to the conversation."""

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Keyword arguments of `session.step` for the answer `text`.

        Raises:
            ActionParseError: the text is no action.
        """


class ServerRenderer:
    """The environment's own renderer: it renders and parses where it runs."""

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """The messages that came with the result."""
        if result.text is None:
            why = f", {NO_PICTURES}" if result.tensors else ""
            raise ConfigError(
                f"the environment shows no text to language models{why}; set environment.render"
                " and environment.parse to 'module:callable'"
            )
        return result.text.messages

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """The text as it is: the server parses it."""
        return {"text": text}


class ImportedRenderer:
    """`render` and `parse` of the run configuration."""

    def __init__(self, render: str, parse: str) -> None:
        self._paths = render, parse
        self._render = import_object(render, "environment.render")
        self._parse = import_object(parse, "environment.parse")

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """What `render` makes of the observation.

        Raises:
            RendererError: it fails.
        """
        path = f"environment.render = '{self._paths[0]}'"
        try:
            messages = self._render(result.observation, first=first)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the boundary to the run's own code
            raise RendererError(f"{path} raised {describe(error)}") from error
        if not _are_messages(messages):
            raise RendererError(
                f"{path} expected to return a list of messages like {{'role': 'user', 'content': "
                f"'...'}}, got {messages!r:.100}"
            )
        return messages

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """What `parse` makes of the text.

        Raises:
            ActionError: the text is no action.
            RendererError: it fails in another way.
        """
        try:
            return {"action": self._parse(text, result.observation)}
        except (UserError, ActionError):
            raise
        except (Exception, SystemExit) as error:  # the boundary to the run's own code
            raise RendererError(
                f"environment.parse = '{self._paths[1]}' raised {describe(error)}; for a text that "
                f"is no action it must raise ActionParseError, and the text was {text[:100]!r}"
            ) from error


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )


def make_renderer(config: EnvironmentConfig) -> ChatRenderer:
    """The renderer that the configuration asks for."""
    if config.render is None or config.parse is None:
        return ServerRenderer()
    return ImportedRenderer(config.render, config.parse)
