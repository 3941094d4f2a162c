"""An episode in a recording: one line of JSON, written by `writer`, read by `verify`.

Rewards, flags and a hash of each observation are enough to see whether an episode goes the
same way again; observations themselves are there when they were asked for.
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

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, NotFoundError

_log = logging.getLogger(__name__)

FORMAT = 1
_HASH_BYTES = 16


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore")


class RecordedEnvironment(_Line):
    """What was played."""

    name: str
    version: str = ""
    target: str = ""
    """What makes the environment again; empty where that is not known."""
    options: JsonObject = Field(default_factory=dict)


class RecordedResult(_Line):
    """What a reset or step gave."""

    observation_hash: str
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    """None where the environment did not say, and in recordings that did not note it."""
    observation: Any = None


class RecordedStep(_Line):
    """One call and its outcome."""

    action: Any = None
    """The action as JSON; None where another field holds it."""
    text: str | None = None
    """A language model's answer."""
    tool: str | None = None
    """The name of a tool that was called, with its `arguments`."""
    arguments: JsonObject | None = None
    result: RecordedResult | None = None
    """None after an error and for tools."""
    tool_hash: str | None = None
    """Of what the tool returned."""
    error: str | None = None
    """The code of the error that the call ended with; the episode continued."""


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
        """The sum of its rewards."""
        return sum((step.result.reward or 0.0) if step.result else 0.0 for step in self.steps)


def timestamp() -> str:
    """The present moment, as recordings write it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def hash_observation(observation: Any, tensors: Mapping[str, np.ndarray]) -> str:
    """A hash that is the same over every wire: of the JSON with sorted keys, and of the tensors."""
    digest = hashlib.sha256(orjson.dumps(observation, option=orjson.OPT_SORT_KEYS))
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()[: 2 * _HASH_BYTES]


def hash_json(value: Any) -> str:
    """The same for what a tool returned."""
    return hash_observation(value, {})


def read_recording(path: Path) -> Iterator[RecordedEpisode]:
    """The episodes of a file, or of all files of a folder, in the order of their lines.

    Half a line is what a killed process left; it is logged and passed over.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: a line is no recorded episode.
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
                    _log.warning("line %d of %s is half a line; passed over", number, path)
                    continue
                place = ".".join(str(part) for part in fault["loc"])
                raise ConfigError(
                    f"expected a recorded episode of format {FORMAT} in line {number} of {path},"
                    f" got {place or 'a line'} that is wrong: {fault['msg']}"
                ) from None
