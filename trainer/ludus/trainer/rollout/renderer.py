"""How the policy sees the environment: its own text renderer, or one named in the configuration."""

from __future__ import annotations

from typing import Any, Protocol

from ludus.env import Message, StepResult
from ludus.proto.config import EnvironmentConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.functions import import_object


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
            raise ConfigError(
                "the environment shows no text to language models; set environment.render and "
                "environment.parse to 'module:callable'"
            )
        return result.text.messages

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """The text as it is: the server parses it."""
        return {"text": text}


class ImportedRenderer:
    """`render` and `parse` of the run configuration."""

    def __init__(self, render: str, parse: str) -> None:
        self._render = import_object(render, "environment.render")
        self._parse = import_object(parse, "environment.parse")

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """What `render` makes of the observation."""
        return self._render(result.observation, first=first)

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """What `parse` makes of the text."""
        return {"action": self._parse(text, result.observation)}


def make_renderer(config: EnvironmentConfig) -> ChatRenderer:
    """The renderer that the configuration asks for."""
    if config.render is None or config.parse is None:
        return ServerRenderer()
    return ImportedRenderer(config.render, config.parse)
