"""An environment that returns every message and rewards its length."""

from __future__ import annotations

from typing import Any

from ludus.env import Environment, Tool, ToolError, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import EpisodeStateError, ErrorCode

from ..models import EchoAction, EchoObservation, EchoState
from ..options import EchoOptions
from ..text import EchoRenderer

_GREETING = "Echo environment ready!"
_CHARACTERS_PER_REWARD = 10
_MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "Message to echo."}},
    "required": ["message"],
    "additionalProperties": False,
}
_TOOLS = (
    Tool("echo_message", "Return the message.", _MESSAGE_SCHEMA),
    Tool("echo_with_length", "Return the message and its number of characters.", _MESSAGE_SCHEMA),
)


class EchoEnvironment(Environment[EchoAction, EchoObservation, EchoState]):
    """An environment that echoes each message, with a reward of 0.1 per character, without end.

    Raises:
        ConfigError: An option was given; there are none.
    """

    action_type = EchoAction
    observation_type = EchoObservation
    state_type = EchoState
    name = "echo_env"
    description = "Echoes messages, for a reward of 0.1 per character"
    needs_network = False
    steps_on_event_loop = True
    text_renderer = EchoRenderer()

    def __init__(self, **options: Any) -> None:
        EchoOptions.parse(options)
        self._is_ready = False
        self._state = EchoState()

    @property
    def tools(self) -> list[Tool]:
        """The tools of newer versions of OpenEnv's echo environment. They earn no reward."""
        return list(_TOOLS)

    def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """Return the echo.

        Raises:
            ToolError: The tool does not exist, or needs exactly one string, `message`.
        """
        if all(tool.name != name for tool in _TOOLS):
            return super().call_tool(name, arguments)  # raises ToolError
        message = arguments.get("message")
        if not isinstance(message, str) or arguments.keys() != {"message"}:
            raise ToolError(f"expected exactly one string, `message`, got {arguments!r:.200}")
        if name == "echo_message":
            return {"result": message}
        return {"message": message, "length": len(message)}

    def reset(  # type: ignore[override]  # lists its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[EchoObservation]:
        """Start an episode. The seed has no effect."""
        self._is_ready = True
        self._state = EchoState(episode_id=episode_id)
        return Transition(EchoObservation(echoed_message=_GREETING))

    def step(self, action: EchoAction) -> Transition[EchoObservation]:
        """Return the echo.

        Raises:
            EpisodeStateError: No episode was started.
        """
        if not self._is_ready:
            raise EpisodeStateError(
                "the first message came before a reset; call reset", ErrorCode.NOT_RESET
            )
        self._state.step_count += 1
        length = len(action.message)
        echo = EchoObservation(echoed_message=action.message, message_length=length)
        return Transition(echo, reward=length / _CHARACTERS_PER_REWARD)

    @property
    def state(self) -> EchoState:
        """The number of echoed messages, as `step_count`."""
        return self._state
