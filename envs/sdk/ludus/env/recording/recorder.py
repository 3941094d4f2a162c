"""A recorder of a server's episodes, each written as one line of JSON.

    SessionCore --results, errors, ends--> EpisodeRecorder --> RecordingFile

Every recording can be replayed (`verify`), because a recorded reset always has a seed.
Lines are written on the event loop, so a slow disk slows the players down and does not fill the
memory. Session ids and tokens are never written.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import orjson

from ludus.env.encoding import EncodedResult, EncodedToolResult, ResetArgs
from ludus.env.recording.format import (
    MAX_FILE_BYTES,
    RECORDING_SUFFIX,
    RecordedEnvironment,
    RecordedEpisode,
    RecordedStep,
    RecordingFile,
    format_timestamp,
    record_result,
    record_tool_call,
)
from ludus.env.sessions.interface import SessionRecorder
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.env.targets.targets import TargetFactory
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import ActionError, EnvError, ExecutionError, ToolError

MAX_EPISODE_BYTES = 8 * 1024 * 1024
"""Maximum size of a recorded episode; later steps are left out."""
MAX_RUNNING_BYTES = 256 * 1024 * 1024
"""Maximum size of all running episodes as JSON. Above it, the largest is written before
its end."""
MAX_RUNNING_EPISODES = 16_384
"""Maximum number of running episodes; above it the oldest is treated as abandoned."""
_REPEATABLE_ERRORS = (ActionError, ExecutionError, ToolError)
"""Types of errors that come from the environment, so a replay raises them again."""


@dataclass(slots=True, eq=False)
class _RunningEpisode:
    episode: RecordedEpisode
    step_index: int
    num_bytes: int = 0
    is_cut: bool = False
    """True if the episode is too long and later steps are left out."""


class EpisodeRecorder(SessionRecorder):
    """Writes the episodes of a server's sessions.

    Args:
        path: a file that ends in .jsonl, or a folder that gets one file per server.
        factory: factory of the environment, which replays use by default.
    """

    needs_seeds = True

    def __init__(
        self,
        path: Path,
        description: EnvironmentDescription,
        factory: TargetFactory | None = None,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_episode_bytes: int = MAX_EPISODE_BYTES,
        max_running_bytes: int = MAX_RUNNING_BYTES,
    ) -> None:
        if path.suffix != RECORDING_SUFFIX:
            path = path / f"{description.server_id}{RECORDING_SUFFIX}"
        self.file = RecordingFile(path, max_file_bytes)
        self._max_episode_bytes = max_episode_bytes
        self._max_running_bytes = max_running_bytes
        self._running_episodes: OrderedDict[str, _RunningEpisode] = OrderedDict()
        self._num_bytes = 0
        """Size of all running episodes."""
        self._environment = RecordedEnvironment(
            name=description.name,
            version=description.version,
            target=factory.target if factory else "",
            options=factory.options if factory else description.options,
        )

    @property
    def num_running(self) -> int:
        """Number of running episodes."""
        return len(self._running_episodes)

    def record_reset(
        self, session_id: str, args: ResetArgs, outcome: EncodedResult | EnvError
    ) -> None:
        self._end_episode(session_id, "reset")
        if isinstance(outcome, EnvError):
            return
        assert args.seed is not None, "every recorded reset has a seed"
        episode = RecordedEpisode(
            environment=self._environment,
            episode_id=args.episode_id or secrets.token_hex(8),
            seed=args.seed,
            reset_options=args.options,
            first=record_result(outcome),
            started_at=format_timestamp(),
        )
        running_episode = self._running_episodes[session_id] = _RunningEpisode(
            episode, outcome.step_index
        )
        self._add_bytes(running_episode, len(episode.model_dump_json(exclude_none=True)))
        if len(self._running_episodes) > MAX_RUNNING_EPISODES:
            self._end_episode(next(iter(self._running_episodes)), "abandoned")

    def record_step(
        self, session_id: str, action: bytes | str, outcome: EncodedResult | EnvError
    ) -> None:
        running_episode = self._running_episodes.get(session_id)
        if running_episode is None:
            return
        step = _record_action(action)
        if isinstance(outcome, EnvError):
            self._add_error(running_episode, step, outcome)
        elif outcome.step_index == running_episode.step_index + 1:  # not a repeated step
            running_episode.step_index += 1
            step.result = record_result(outcome)
            self._add_step(running_episode, step)
            if outcome.done:
                self._end_episode(session_id, "terminated" if outcome.terminated else "truncated")

    def record_tool_call(
        self,
        session_id: str,
        name: str,
        arguments: JsonObject,
        outcome: EncodedToolResult | EnvError,
    ) -> None:
        running_episode = self._running_episodes.get(session_id)
        if running_episode is None:
            return
        if isinstance(outcome, EnvError):
            step = RecordedStep(tool=name, arguments=arguments)
            self._add_error(running_episode, step, outcome)
            return
        content = orjson.loads(outcome.content_json)
        self._add_step(running_episode, record_tool_call(name, arguments, content, outcome))
        if outcome.done:
            self._end_episode(session_id, "terminated" if outcome.terminated else "truncated")

    def record_end(self, session_id: str, tombstone: SessionTombstone) -> None:
        self._end_episode(session_id, tombstone.reason)

    def finish(self) -> None:
        """Write the running episodes and close the file, before the server stops."""
        for session_id in list(self._running_episodes):
            self._end_episode(session_id, "the server stopped")
        self.file.close()

    def _add_bytes(self, running_episode: _RunningEpisode, num_bytes: int) -> None:
        running_episode.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._running_episodes and self._num_bytes > self._max_running_bytes:
            session_id, _ = max(self._running_episodes.items(), key=lambda pair: pair[1].num_bytes)
            self._end_episode(session_id, "unfinished: the memory limit of recordings was reached")

    def _add_error(
        self, running_episode: _RunningEpisode, step: RecordedStep, error: EnvError
    ) -> None:
        if isinstance(error, _REPEATABLE_ERRORS):
            step.error = str(error.code)
            self._add_step(running_episode, step)

    def _add_step(self, running_episode: _RunningEpisode, step: RecordedStep) -> None:
        num_bytes = len(step.model_dump_json(exclude_none=True))
        running_episode.is_cut |= running_episode.num_bytes + num_bytes > self._max_episode_bytes
        if not running_episode.is_cut:
            running_episode.episode.steps.append(step)
            self._add_bytes(running_episode, num_bytes)

    def _end_episode(self, session_id: str, reason: str) -> None:
        """Write the session's episode if it is running."""
        running_episode = self._running_episodes.pop(session_id, None)
        if running_episode is None:
            return
        self._num_bytes -= running_episode.num_bytes
        if running_episode.is_cut:
            reason += "; too long, later steps left out"
        self.file.append(running_episode.episode, reason)


def _record_action(action: bytes | str) -> RecordedStep:
    if isinstance(action, str):
        return RecordedStep(text=action)
    try:
        return RecordedStep(action=orjson.loads(action))
    except orjson.JSONDecodeError:  # the session refuses malformed JSON
        return RecordedStep()
