"""Agents written by users: each episode starts, calls or imports one agent."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator

from ludus.proto.config.section import ImportPath, PositiveInt, Seconds, Section
from ludus.proto.paths import PathText

_KIND_BY_FIELD = {"command": "program", "url": "service", "function": "in_process"}
"""Kind of an agent, by the field that only agents of this kind have."""


class _Agent(Section):
    timeout_s: Seconds = 120.0
    """Time limit in seconds of an episode's agent. After that, the agent is stopped and the
    episode is void."""
    max_concurrent: PositiveInt = 64
    """Maximum number of agents that a rollout worker runs at once; further agents wait."""
    answer: Literal["json", "text", "last_message", "none"] = "json"
    """Action of the environment step that follows when the agent has finished: `answer` or `action`
    of the agent's JSON output, the agent's whole output as text, or the last completion of the
    policy. "none" makes no step (docs/agents.md)."""
    host: str = "127.0.0.1"
    """Address that the endpoint of a rollout worker listens on. Use 0.0.0.0 if agents run on
    other machines."""


class CommandAgent(_Agent):
    """A program that is started for each episode, in the sandbox of the environments."""

    kind: Literal["program"] = "program"
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments. In an argument, `{task}` is replaced by the task as JSON, and `{text}`
    by the text of the first observation."""
    folder: PathText = "."
    """Working directory of the program, which the program may read."""
    allow_read: tuple[PathText, ...] = ()
    """Further files and folders that the program may read."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables of the rollout worker that are passed to the program, in
    addition to variables that are always safe, such as PATH."""
    max_concurrent: PositiveInt = 16
    """Maximum number of programs that a rollout worker runs at once; further programs wait."""
    sandbox: Literal["offered", "required", "off"] = "offered"
    """Confinement of the program: "offered" uses the layers that the machine supports, "required"
    fails if a layer is missing, "off" uses none (docs/security.md)."""

    @field_validator("command")
    @classmethod
    def _expand_program(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        return (os.path.expanduser(command[0]), *command[1:])


class UrlAgent(_Agent):
    """A service that gets one POST per episode, with the task and the address of the policy."""

    kind: Literal["service"] = "service"
    url: str
    """URL of the service: http://host:port/path or https://..."""
    token_env: str = "LUDUS_AGENT_TOKEN"
    """Name of the environment variable with the bearer token of the service. The variable may be
    unset."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        split_url = urlsplit(url)
        if (
            split_url.scheme not in ("http", "https")
            or not split_url.hostname
            or split_url.username
        ):
            raise ValueError(
                "expected http://host:port/path or https://..., without credentials "
                "(they come from the environment variable token_env), got "
                f"'{split_url.scheme}://{split_url.hostname or ''}{split_url.path}'"
            )
        return url


class FunctionAgent(_Agent):
    """A Python function that the rollout worker calls for each episode."""

    kind: Literal["in_process"] = "in_process"
    function: ImportPath
    """Function (task, endpoint) -> result of the agent. It is asynchronous, or runs in a
    thread."""


def _add_kind(section: Any) -> Any:
    """Add the kind of the agent, which follows from its fields."""
    if not isinstance(section, dict) or "kind" in section:
        return section
    kind_fields = [name for name in _KIND_BY_FIELD if name in section]
    if len(kind_fields) != 1:
        raise ValueError(
            "an agent needs exactly one of command = [...], url = '...' and function = "
            f"'module:callable', got {' and '.join(kind_fields) or 'none of them'}"
        )
    return {"kind": _KIND_BY_FIELD[kind_fields[0]], **section}


AgentConfig = Annotated[
    CommandAgent | UrlAgent | FunctionAgent,
    Field(discriminator="kind"),
    BeforeValidator(_add_kind),
]
