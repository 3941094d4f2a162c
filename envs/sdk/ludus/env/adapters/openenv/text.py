"""The text renderer of OpenEnv environments, which have no text themselves."""

from __future__ import annotations

from pydantic import ValidationError

from ludus.env.text.fields import FieldsText
from ludus.env.types import Action, Message, Observation
from ludus.proto.errors import ActionParseError


class OpenEnvRenderer:
    """A text renderer for one environment, based on the schema of `action_type`."""

    def __init__(self, name: str, action_type: type[Action]) -> None:
        self._action_type = action_type
        self._text = FieldsText(name, action_type.model_json_schema())

    def render(self, observation: Observation, *, first: bool) -> list[Message]:
        """Return one message with a field per line, and after a reset with instructions."""
        content = self._text.content(observation.model_dump(mode="json"), first=first)
        return [{"role": "user", "content": content}]

    def parse(self, text: str, observation: Observation) -> Action:
        """Parse a text to an action."""
        data = self._text.action(text, observation.model_extra or {})
        try:
            return self._action_type.model_validate(data)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]["msg"]
            raise ActionParseError(
                f"expected an action as described, got {text[-200:]!r}: {fault}"
            ) from None

    def legal_answers(self, observation: Observation) -> list[str]:
        """Return the observation's `legal_actions` as text, or the values of an enum."""
        return self._text.legal_answers(observation.model_extra or {})
