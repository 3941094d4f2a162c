"""Agents that somebody else wrote: started, called or imported, one for each episode."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator

from ludus.proto.config.section import ImportPath, PositiveInt, Seconds, Section

_KINDS = {"command": "program", "url": "service", "function": "in_process"}
"""By the field that only this kind of agent has."""


class _Agent(Section):
    timeout_s: Seconds = 120.0
    """How long an episode's agent may take before it is ended and the episode is void."""
    max_concurrent: PositiveInt = 64
    """Agents that a rollout worker runs at once; the others wait until one has ended."""
    answer: Literal["json", "text", "last_message", "none"] = "json"
    """What the environment is stepped with when the agent has ended: `answer` or `action` of the
    JSON object that it returns, all of the text that it returns, the last thing that the policy
    has said, or nothing (docs/agents.md)."""
    host: str = "127.0.0.1"
    """Address that the endpoint of a rollout worker listens on; 0.0.0.0 where agents run on other
    machines."""


class CommandAgent(_Agent):
    """A program that is started for each episode, in the sandbox of the environment plane."""

    kind: Literal["program"] = "program"
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments; `{task}` in one of them is the task as JSON, `{text}` the
    text of the first observation."""
    folder: str = "."
    """In which it is started, and what it may read of it."""
    allow_read: tuple[str, ...] = ()
    """More files and folders that it may read."""
    pass_env: tuple[str, ...] = ()
    """Environment variables of the rollout worker that it gets beside the harmless ones."""
    max_concurrent: PositiveInt = 16
    """Programs that a rollout worker runs at once; the others wait until one has ended."""
    sandbox: Literal["offered", "required", "off"] = "offered"
    """Whether it is confined as far as the machine offers it, refused where a layer is missing, or
    not confined at all (docs/security.md)."""


class UrlAgent(_Agent):
    """A service that is called for each episode: POST with the task and where the policy is."""

    kind: Literal["service"] = "service"
    url: str
    """http://host:port/path or https://..."""
    token_env: str = "LUDUS_AGENT_TOKEN"
    """Environment variable that holds the service's bearer token; it may be unset."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError(
                "expected http://host:port/path or https://..., without credentials "
                f"(they come from the variable that token_env names), got '{parts.scheme}://"
                f"{parts.hostname or ''}{parts.path}'"
            )
        return url


class FunctionAgent(_Agent):
    """A Python function that is called in the rollout worker for each episode."""

    kind: Literal["in_process"] = "in_process"
    function: ImportPath
    """(task, endpoint) -> what the agent returns; asynchronous, or run in a thread."""


def _with_kind(value: Any) -> Any:
    """The section with the kind that its fields tell."""
    if not isinstance(value, dict) or "kind" in value:
        return value
    named = [field for field in _KINDS if field in value]
    if len(named) != 1:
        raise ValueError(
            "expected exactly one of command = [...], url = '...' and function = "
            f"'module:callable', got {' and '.join(named) or 'none of them'}"
        )
    return {"kind": _KINDS[named[0]], **value}


AgentConfig = Annotated[
    CommandAgent | UrlAgent | FunctionAgent,
    Field(discriminator="kind"),
    BeforeValidator(_with_kind),
]
