"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}.

OpenAI's clients automatically retry after 408, 409, 429 and 5xx. A request that would fail again
gets another status.
"""

from __future__ import annotations

from typing import Any

from ludus.proto.errors import LudusError


class ApiError(LudusError):
    """A request that cannot be served, with the error that the agent receives."""

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
        """Body of the HTTP response."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class LimitError(ApiError):
    """A limit of the run leaves no room for the completion; the episode ends as truncated."""


class FieldError(ApiError):
    """A field of a request has an invalid value."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{param}: {message}", param=param, code=code)


def invalid_key_error() -> ApiError:
    """Return the error for a key that belongs to no running episode of this worker."""
    return ApiError(
        "expected the key of an episode that is being played here (OPENAI_API_KEY of its agent), "
        "got another one; the key ends with its episode",
        status=401,
        code="invalid_api_key",
    )
