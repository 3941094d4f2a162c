"""Refusals in OpenAI's form: {"error": {"message", "type", "param", "code"}}.

Clients of OpenAI's try again by themselves after 408, 409, 429 and 5xx. What would be refused again
is answered with another status.
"""

from __future__ import annotations

from typing import Any

from ludus.proto.errors import LudusError


class ApiError(LudusError):
    """A request that is not answered, and what the agent is told."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """What the response holds."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class LimitError(ApiError):
    """A limit of the run leaves no room for the answer: the episode ends as truncated."""


class FieldError(ApiError):
    """A field of a request that is not as it should be."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{param}: {message}", param=param, code=code)


def unauthorized() -> ApiError:
    """The refusal of a key that belongs to no episode of this worker, or to one that is over."""
    return ApiError(
        "expected the key of an episode that is being played here (OPENAI_API_KEY of its agent), "
        "got another one; the key ends with its episode",
        status=401,
        code="invalid_api_key",
    )
