"""A recorder of played episodes, each written as one line of JSON.

    wire --> RecordingSessions --> Sessions that play
                   | an episode has ended, or was abandoned
                   v
             RecordingFile: <file>.jsonl, a new one when it is full

Every recording can be replayed (`verify`), because a reset without a seed gets one here.
Lines are written on the event loop, so a slow disk slows the players down and does not fill the
memory. Session ids and tokens are never written.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from ludus.env.encoding import DefaultSeeds, EncodedResult, ResetArgs
from ludus.env.recording.file import MAX_FILE_BYTES, SUFFIX, RecordingFile
from ludus.env.recording.format import (
    RecordedEnvironment,
    RecordedEpisode,
    RecordedResult,
    RecordedStep,
    hash_json,
    record_result,
    timestamp,
)
from ludus.env.sessions.interface import (
    Connection,
    ImmediateCalls,
    Load,
    OpenArgs,
    OpenResult,
    Sessions,
)
from ludus.env.sessions.metrics import WorkerCounts
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.env.targets.targets import TargetFactory
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    ActionError,
    EnvError,
    ExecutionError,
    InfrastructureError,
    ToolError,
)

MAX_EPISODE_BYTES = 8 * 1024 * 1024
"""Maximum size of a recorded episode; later steps are left out."""
MAX_RUNNING_BYTES = 256 * 1024 * 1024
"""Maximum size of all running episodes as JSON; above it the longest is written unfinished."""
MAX_RUNNING = 16_384
"""Maximum number of running episodes; above it the oldest is treated as abandoned."""
_REPEATABLE = (ActionError, ExecutionError, ToolError)
"""Errors of the environment, which a replay repeats."""


@dataclass(slots=True, eq=False)
class _OpenEpisode:
    episode: RecordedEpisode
    step_index: int = 0
    num_bytes: int = 0
    is_cut: bool = False
    """True if the episode is too long and later steps are left out."""
    is_written: bool = False
    num_calls: int = 0
    """Number of calls under way; the episode is written after their results are recorded."""
    end_reason: str = ""
    """Reason why the session ended during a call."""


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """Options of a recording."""

    full: bool = False
    """Record whole observations in addition to their hashes."""
    built_from: TargetFactory | None = None
    """Factory of the environment, for replays that name no target."""
    first_seed: int | None = None
    """Seed of the first reset without a seed; each later reset adds 1. None draws random seeds."""
    max_file_bytes: int = MAX_FILE_BYTES
    max_episode_bytes: int = MAX_EPISODE_BYTES
    max_running_bytes: int = MAX_RUNNING_BYTES


class RecordingSessions:
    """The sessions of `inner` with a record of every episode; implements `Sessions`.

    Args:
        path: a file that ends in .jsonl, or a folder that gets one file per server.
    """

    def __init__(
        self, inner: Sessions, path: Path | str, options: RecordingOptions | None = None
    ) -> None:
        self.inner = inner
        self._options = options or RecordingOptions()
        path = Path(path)
        if path.suffix != SUFFIX:
            path = path / f"{inner.description.server_id or 'episodes'}{SUFFIX}"
        self.file = RecordingFile(path, self._options.max_file_bytes)
        self._running: OrderedDict[str, _OpenEpisode] = OrderedDict()
        self._num_bytes = 0
        """Size of all running episodes."""
        self._session_ids: dict[str, str] = {}
        """Session id by tools id."""
        self._tools_ids: dict[str, str] = {}
        """Tools id by session id."""
        self._seeds = DefaultSeeds(self._options.first_seed)
        self._environment = self._describe()
        self._immediate = inner.immediate
        self.immediate: ImmediateCalls | None = self if inner.immediate else None
        inner.events.on_end.append(self._on_end)
        # Members that need no recording.
        self.description, self.events, self.counts = inner.description, inner.events, inner.counts
        self.state, self.detach, self.attach = inner.state, inner.detach, inner.attach
        self.release, self.drain = inner.release, inner.drain

    @property
    def load(self) -> Load:
        return self.inner.load

    @property
    def worker_counts(self) -> WorkerCounts | None:
        return self.inner.worker_counts

    @property
    def unavailable_reason(self) -> str:
        return self.inner.unavailable_reason

    @property
    def num_running(self) -> int:
        """Number of running episodes."""
        return len(self._running)

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> OpenResult:
        if args.reset is not None:
            args = replace(args, reset=self._seeds.fill(args.reset))
        session = await self.inner.open(args, connection)
        self._begin_opened(session, args)
        return session

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[OpenResult]:
        args = replace(args, reset=self._seeds.fill(args.reset or ResetArgs()))
        group = await self.inner.open_group(args, size, connection, session_ids)
        for session in group:
            self._begin_opened(session, args)
        return group

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        args = self._end_and_seed(session_id, args)
        result = await self.inner.reset(session_id, args)
        self._begin(session_id, args, result)
        return result

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        assert self._immediate is not None, "reset_now needs immediate calls"
        args = self._end_and_seed(session_id, args)
        result = self._immediate.reset_now(session_id, args)
        self._begin(session_id, args, result)
        return result

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        episode = self._running.get(session_id)
        if episode is None:
            return await self.inner.step(session_id, action, step_index, timeout_s)
        with self._recording(session_id, episode, _record_action(action)) as step:
            result = await self.inner.step(session_id, action, step_index, timeout_s)
            self._add_result(episode, step, result)
        return result

    def step_now(self, session_id: str, action: bytes | str, step_index: int = 0) -> EncodedResult:
        assert self._immediate is not None, "step_now needs immediate calls"
        episode = self._running.get(session_id)
        if episode is None:
            return self._immediate.step_now(session_id, action, step_index)
        with self._recording(session_id, episode, _record_action(action)) as step:
            result = self._immediate.step_now(session_id, action, step_index)
            self._add_result(episode, step, result)
        return result

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        driving_id = self._session_ids.get(session_id, session_id)
        episode = self._running.get(driving_id)
        if episode is None:
            return await self.inner.call_tool(session_id, name, arguments)
        call = RecordedStep(tool=name, arguments=arguments)
        with self._recording(driving_id, episode, call) as step:
            result = await self.inner.call_tool(session_id, name, arguments)
            step.tool_hash = hash_json(orjson.loads(result))
            self._add_step(episode, step)
        return result

    async def close(self, session_id: str) -> None:
        await self.inner.close(session_id)
        self._end(session_id, "closed")

    def finish(self, reason: str = "the server stopped") -> None:
        """Write the running episodes and close the file, before the server stops."""
        for session_id, episode in list(self._running.items()):
            episode.end_reason = episode.end_reason or reason
            self._write(session_id, episode)
        self.file.close()

    def _describe(self) -> RecordedEnvironment:
        description, built_from = self.inner.description, self._options.built_from
        return RecordedEnvironment(
            name=description.name,
            version=description.version,
            target=built_from.target if built_from else "",
            options=built_from.options if built_from else description.options,
        )

    def _end_and_seed(self, session_id: str, args: ResetArgs) -> ResetArgs:
        self._end(session_id, "reset")
        return self._seeds.fill(args)

    def _on_end(self, session_id: str, tombstone: SessionTombstone) -> None:
        self._session_ids.pop(self._tools_ids.pop(session_id, ""), None)
        self._end(session_id, tombstone.reason)

    def _begin_opened(self, opened: OpenResult, args: OpenArgs) -> None:
        if opened.tools_session_id:
            self._session_ids[opened.tools_session_id] = opened.session_id
            self._tools_ids[opened.session_id] = opened.tools_session_id
        if args.reset is not None and opened.first is not None:
            self._begin(opened.session_id, args.reset, opened.first)

    def _begin(self, session_id: str, args: ResetArgs, first: EncodedResult) -> None:
        assert args.seed is not None, "every recorded reset has a seed"
        episode = RecordedEpisode(
            environment=self._environment,
            episode_id=args.episode_id or secrets.token_hex(8),
            seed=args.seed,
            reset_options=args.options,
            first=self._record_result(first),
            started_at=timestamp(),
        )
        running = self._running[session_id] = _OpenEpisode(episode, first.step_index)
        self._count(running, len(episode.model_dump_json(exclude_none=True)))
        if len(self._running) > MAX_RUNNING:
            self._end(next(iter(self._running)), "abandoned")

    def _count(self, running: _OpenEpisode, num_bytes: int) -> None:
        running.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._running and self._num_bytes > self._options.max_running_bytes:
            session_id, episode = max(self._running.items(), key=lambda item: item[1].num_bytes)
            episode.end_reason = "unfinished; too much is recorded at once"
            self._write(session_id, episode)

    def _record_result(self, result: EncodedResult) -> RecordedResult:
        observation = orjson.loads(result.observation_json)
        return record_result(result, observation, keep_observation=self._options.full)

    @contextlib.contextmanager
    def _recording(
        self, session_id: str, running: _OpenEpisode, step: RecordedStep
    ) -> Iterator[RecordedStep]:
        """Yield the step during its call: record an error, and delay the episode's end."""
        running.num_calls += 1
        try:
            yield step
        except EnvError as error:
            self._add_error(running, step, error)
            raise
        finally:
            running.num_calls -= 1
            if running.end_reason and not running.num_calls:
                self._write(session_id, running)

    def _add_error(self, running: _OpenEpisode, step: RecordedStep, error: EnvError) -> None:
        if isinstance(error, _REPEATABLE):
            step.error = str(error.code)
            self._add_step(running, step)
        elif isinstance(error, InfrastructureError):
            running.end_reason = running.end_reason or f"lost: {error.code}"

    def _add_result(self, running: _OpenEpisode, step: RecordedStep, result: EncodedResult) -> None:
        if result.step_index != running.step_index + 1:  # a repeated step
            return
        running.step_index += 1
        step.result = self._record_result(result)
        self._add_step(running, step)
        if result.done:
            running.end_reason = "terminated" if result.terminated else "truncated"

    def _add_step(self, running: _OpenEpisode, step: RecordedStep) -> None:
        if running.is_cut or running.is_written:
            return
        num_bytes = len(step.model_dump_json(exclude_none=True))
        if running.num_bytes + num_bytes > self._options.max_episode_bytes:
            running.is_cut = True
            return
        running.episode.steps.append(step)
        self._count(running, num_bytes)

    def _end(self, session_id: str, reason: str) -> None:
        """Write the session's episode if it is still running."""
        episode = self._running.get(session_id)
        if episode is None:
            return
        episode.end_reason = episode.end_reason or reason
        if not episode.num_calls:
            self._write(session_id, episode)

    def _write(self, session_id: str, running: _OpenEpisode) -> None:
        if self._running.get(session_id) is running:
            del self._running[session_id]
        if running.is_written:
            return
        running.is_written = True
        self._num_bytes -= running.num_bytes
        episode = running.episode
        episode.ended_at = timestamp()
        episode.end_reason = running.end_reason
        if running.is_cut:
            episode.end_reason += "; too long, later steps left out"
        self.file.append(episode.model_dump_json(exclude_none=True).encode())


def _record_action(action: bytes | str) -> RecordedStep:
    if isinstance(action, str):
        return RecordedStep(text=action)
    try:
        return RecordedStep(action=orjson.loads(action))
    except orjson.JSONDecodeError:  # refused as malformed; a replay does not repeat it
        return RecordedStep()
