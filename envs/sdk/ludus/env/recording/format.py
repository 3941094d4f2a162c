"""The format and the files of recordings: one line of JSON per episode.

Rewards, flags and a hash of each observation are enough to check a replay. The recordings of
clients also contain the observations.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.env.encoding import EncodedResult, EncodedToolResult
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, ToolResult
from ludus.proto.errors import ConfigError, NotFoundError

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MAX_FILE_BYTES = 64 * 1024 * 1024
RECORDING_SUFFIX = ".jsonl"
_HASH_BYTES = 16


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore")


class RecordedEnvironment(_Line):
    """The environment of an episode."""

    name: str
    version: str = ""
    target: str = ""
    """Target that names the environment; "" if unknown."""
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
    """Action as JSON; None if the player sent text or called a tool."""
    text: str | None = None
    """Text of a language model."""
    tool: str | None = None
    """Name of the called tool."""
    arguments: JsonObject | None = None
    result: RecordedResult | None = None
    """None after an error, and for tool calls that neither paid a reward nor ended the episode."""
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


def format_timestamp() -> str:
    """Return the current time as text in the format of recordings."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def hash_observation(observation: Any, tensors: Mapping[str, np.ndarray] | None = None) -> str:
    """Hash an observation and its tensors; the hash is the same over every wire."""
    digest = hashlib.sha256(orjson.dumps(observation, option=orjson.OPT_SORT_KEYS))
    for name, array in sorted((tensors or {}).items()):
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()[: 2 * _HASH_BYTES]


def record_result(result: EncodedResult | StepResult) -> RecordedResult:
    """Convert the result of a reset or step; only a client's result keeps its observation."""
    if isinstance(result, StepResult):
        observation = result.observation
    else:
        observation = orjson.loads(result.observation_json)
    return RecordedResult(
        observation_hash=hash_observation(observation, result.tensors),
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        success=result.success,
        observation=observation if isinstance(result, StepResult) else None,
    )


def record_tool_call(
    name: str, arguments: JsonObject, content: Any, result: EncodedToolResult | ToolResult
) -> RecordedStep:
    """Convert a tool call and its result, whose content is given as a JSON value."""
    content_hash = hash_observation(content)
    step = RecordedStep(tool=name, arguments=arguments, tool_hash=content_hash)
    if result.reward is not None or result.done:
        step.result = RecordedResult(
            observation_hash=content_hash,
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            success=result.success,
        )
    return step


def read_recording(path: Path) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a file, or of all files of a folder, in order.

    An incomplete line, which a killed process leaves, is logged and skipped.

    Raises:
        NotFoundError: the file does not exist.
        ConfigError: a line is not a recorded episode.
    """
    if path.is_dir():
        for recording_file in sorted(path.glob(f"*{RECORDING_SUFFIX}")):
            yield from read_recording(recording_file)
        return
    if not path.is_file():
        raise NotFoundError(f"no recording '{path}'; record one with ludus env serve --record")
    with path.open("rb") as recording:
        for line_number, line in enumerate(recording, 1):
            try:
                yield RecordedEpisode.model_validate_json(line)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                if fault["type"] == "json_invalid":
                    _log.warning("line %d of %s is incomplete and was skipped", line_number, path)
                    continue
                field = ".".join(str(key) for key in fault["loc"])
                raise ConfigError(
                    f"line {line_number} of {path} is not a recorded episode of format"
                    f" {FORMAT_VERSION}: {field or 'line'}: {fault['msg']}"
                ) from None


class RecordingFile:
    """A file `<name>.jsonl` of appended lines; a full file is renamed to `<name>.0001.jsonl`."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self.num_lost = 0
        """Number of episodes that could not be written."""
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = None

    def append(self, episode: RecordedEpisode, end_reason: str) -> None:
        """Append an episode that has just ended; if it cannot be written, log the loss."""
        episode.ended_at, episode.end_reason = format_timestamp(), end_reason
        line = episode.model_dump_json(exclude_none=True).encode()
        try:
            if self._file is None:
                self._file = self._open_file()
            num_bytes = self._file.tell()
            if num_bytes and num_bytes + len(line) > self._max_bytes:
                self._rename_full_file()
                self._file = self._open_file()
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            self.num_lost += 1
            _log.error("an episode could not be recorded in %s: %s", self.path, error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_file(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        recording_file = self.path.open("ab+")
        if recording_file.tell():  # a killed process may have left an incomplete line
            recording_file.seek(-1, 2)
            if recording_file.read(1) != b"\n":
                recording_file.write(b"\n")
        return recording_file

    def _rename_full_file(self) -> None:
        self.close()
        file_number = 1
        while (path := self.path.with_suffix(f".{file_number:04d}{RECORDING_SUFFIX}")).exists():
            file_number += 1
        self.path.rename(path)


class EpisodeWriter:
    """Appends the episodes of one player to a file, in the format of a server's recording.

    Args:
        target: target of the environment, for replays; "" if unknown.
    """

    def __init__(
        self, path: Path, description: EnvironmentDescription, target: str, options: JsonObject
    ) -> None:
        self._file = RecordingFile(path)
        self._environment = RecordedEnvironment(
            name=description.name,
            version=description.version,
            target=target,
            options=options if target else description.options,
        )
        self._episode: RecordedEpisode | None = None

    def begin_episode(self, seed: int, first_result: StepResult) -> None:
        """Start an episode."""
        self._episode = RecordedEpisode(
            environment=self._environment,
            episode_id=secrets.token_hex(8),
            seed=seed,
            first=record_result(first_result),
            started_at=format_timestamp(),
        )

    def add_step(self, action: JsonObject | str, result: StepResult) -> None:
        """Add a step to the episode."""
        assert self._episode is not None, "an episode has begun"
        step = RecordedStep(text=action) if isinstance(action, str) else RecordedStep(action=action)
        step.result = record_result(result)
        self._episode.steps.append(step)

    def add_tool_call(self, name: str, arguments: JsonObject, result: ToolResult) -> None:
        """Add a tool call to the episode."""
        assert self._episode is not None, "an episode has begun"
        self._episode.steps.append(record_tool_call(name, arguments, result.content, result))

    def end_episode(self, reason: str) -> None:
        """Write the episode, if there is one."""
        if self._episode is not None:
            self._file.append(self._episode, reason)
            self._file.close()
            self._episode = None
