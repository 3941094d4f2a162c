"""What is said comes back, and pays 0.1 per character."""

from __future__ import annotations

from ludus.env import Environment, Tool, ToolError, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import EpisodeStateError, ErrorCode

from ..models import EchoAction, EchoObservation, EchoState
from ..text import EchoRenderer

_READY = "Echo environment ready!"
_CHARACTERS_PER_REWARD = 10
_MESSAGE = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "What to echo."}},
    "required": ["message"],
    "additionalProperties": False,
}
_TOOLS = (
    Tool("echo_message", "The message, as it was said.", _MESSAGE),
    Tool("echo_with_length", "The message, and how many characters it has.", _MESSAGE),
)


class EchoEnvironment(Environment[EchoAction, EchoObservation, EchoState]):
    """Every message is echoed, for a reward of 0.1 per character; no episode ends by itself."""

    action_type = EchoAction
    observation_type = EchoObservation
    state_type = EchoState
    name = "echo_env"
    description = "Echoes messages, for a reward of 0.1 per character"
    steps_on_event_loop = True
    text_renderer = EchoRenderer()

    def __init__(self) -> None:
        self._is_ready = False
        self._state = EchoState()

    @property
    def tools(self) -> list[Tool]:
        """Those of OpenEnv's later generations; they pay nothing."""
        return list(_TOOLS)

    def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """The echo.

        Raises:
            ToolError: there is no such tool, or no message.
        """
        if all(tool.name != name for tool in _TOOLS):
            return super().call_tool(name, arguments)  # refuses it
        message = arguments.get("message")
        if not isinstance(message, str) or arguments.keys() != {"message"}:
            raise ToolError(
                f"expected a text as `message` and nothing else, got {arguments!r:.200}"
            )
        if name == "echo_message":
            return {"result": message}
        return {"message": message, "length": len(message)}

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[EchoObservation]:
        """That it is ready; there is nothing that a seed could decide."""
        self._is_ready = True
        self._state = EchoState(episode_id=episode_id)
        return Transition(EchoObservation(echoed_message=_READY))

    def step(self, action: EchoAction) -> Transition[EchoObservation]:
        """The echo.

        Raises:
            EpisodeStateError: no episode has begun.
        """
        if not self._is_ready:
            raise EpisodeStateError(
                "expected a reset before the first message, got none; call reset",
                ErrorCode.NOT_RESET,
            )
        self._state.step_count += 1
        length = len(action.message)
        echo = EchoObservation(echoed_message=action.message, message_length=length)
        return Transition(echo, reward=length / _CHARACTERS_PER_REWARD)

    @property
    def state(self) -> EchoState:
        """How many messages were echoed."""
        return self._state
