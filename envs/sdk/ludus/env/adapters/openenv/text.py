"""How a language model sees an environment that was written for OpenEnv, which has no text."""

from __future__ import annotations

from pydantic import ValidationError

from ludus.env.text.fields import FieldsText
from ludus.env.types import Action, Message, Observation
from ludus.proto.errors import ActionParseError


class OpenEnvRenderer:
    """Text for one environment; `action_type` publishes the foreign schema."""

    def __init__(self, name: str, action_type: type[Action]) -> None:
        self._action_type = action_type
        self._text = FieldsText(name, action_type.model_json_schema())

    def render(self, observation: Observation, *, first: bool) -> list[Message]:
        """One message: the fields, one a line, and after a reset what to answer."""
        shown = self._text.content(observation.model_dump(mode="json"), first=first)
        return [{"role": "user", "content": shown}]

    def parse(self, text: str, observation: Observation) -> Action:
        """The action that the text means."""
        data = self._text.action(text, observation.model_extra or {})
        try:
            return self._action_type.model_validate(data)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]["msg"]
            raise ActionParseError(
                f"expected an action as described, got {text[-200:]!r}: {fault}"
            ) from None

    def legal_answers(self, observation: Observation) -> list[str]:
        """The observation's `legal_actions` as text, or the values of an enum."""
        return self._text.legal_answers(observation.model_extra or {})
