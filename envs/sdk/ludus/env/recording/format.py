"""The format of a recording: one line of JSON per episode.

Rewards, flags and a hash of each observation are enough to check a replay. The observations
themselves are included on request.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.env.encoding import EncodedResult
from ludus.env.types import JsonObject, StepResult
from ludus.proto.errors import ConfigError, NotFoundError

_log = logging.getLogger(__name__)

FORMAT = 1
_HASH_BYTES = 16


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore")


class RecordedEnvironment(_Line):
    """The environment of an episode."""

    name: str
    version: str = ""
    target: str = ""
    """Target that makes the environment again; "" if unknown."""
    options: JsonObject = Field(default_factory=dict)


class RecordedResult(_Line):
    """The result of a reset or a step."""

    observation_hash: str
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    """None if the environment did not report it, or the recording is older than the field."""
    observation: Any = None


class RecordedStep(_Line):
    """One call and its result or error."""

    action: Any = None
    """Action as JSON; None if the call is a text or a tool call."""
    text: str | None = None
    """Text of a language model."""
    tool: str | None = None
    """Name of the called tool."""
    arguments: JsonObject | None = None
    result: RecordedResult | None = None
    """None after an error and for tool calls."""
    tool_hash: str | None = None
    """Hash of the tool's result."""
    error: str | None = None
    """Code of the error that the call returned; the episode continued."""


class RecordedEpisode(_Line):
    """One episode, from its reset to its end."""

    format: Literal[1] = 1
    environment: RecordedEnvironment
    episode_id: str = ""
    seed: int
    reset_options: JsonObject = Field(default_factory=dict)
    first: RecordedResult
    steps: list[RecordedStep] = Field(default_factory=list)
    started_at: str = ""
    ended_at: str = ""
    end_reason: str = ""

    @property
    def episode_return(self) -> float:
        """Sum of the rewards."""
        return sum((step.result.reward or 0.0) if step.result else 0.0 for step in self.steps)


def timestamp() -> str:
    """Return the current time in the format of recordings."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def hash_observation(observation: Any, tensors: Mapping[str, np.ndarray]) -> str:
    """Hash the JSON with sorted keys and the tensors; the hash is the same over every wire."""
    digest = hashlib.sha256(orjson.dumps(observation, option=orjson.OPT_SORT_KEYS))
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()[: 2 * _HASH_BYTES]


def hash_json(value: Any) -> str:
    """Hash a tool's result, as `hash_observation` does."""
    return hash_observation(value, {})


def record_result(
    result: EncodedResult | StepResult, observation: Any, *, keep_observation: bool
) -> RecordedResult:
    """Convert the result of a reset or step to its recorded form."""
    return RecordedResult(
        observation_hash=hash_observation(observation, result.tensors),
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        success=result.success,
        observation=observation if keep_observation else None,
    )


def read_recording(path: Path) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a file, or of all files of a folder, in order.

    An incomplete line, which a killed process leaves, is logged and skipped.

    Raises:
        NotFoundError: the file does not exist.
        ConfigError: a line is not a recorded episode.
    """
    if path.is_dir():
        for file in sorted(path.glob("*.jsonl")):
            yield from read_recording(file)
        return
    if not path.is_file():
        raise NotFoundError(f"no recording '{path}'; record one with ludus env serve --record")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield RecordedEpisode.model_validate_json(line)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                if fault["type"] == "json_invalid":
                    _log.warning("line %d of %s is incomplete and was skipped", number, path)
                    continue
                field = ".".join(str(part) for part in fault["loc"])
                raise ConfigError(
                    f"line {number} of {path} is not a recorded episode of format {FORMAT}:"
                    f" {field or 'line'}: {fault['msg']}"
                ) from None
