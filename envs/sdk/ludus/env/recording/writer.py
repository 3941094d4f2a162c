"""Recording what is played: `Sessions` that write each finished episode as one line of JSON.

    wire --> RecordingSessions --> Sessions that play
                   | an episode has ended, or was abandoned
                   v
             RecordingFile: <file>.jsonl, a new one when it is full

Every recording can be played again (`verify`): a reset without a seed gets one here.
Nobody waits but for the write itself, which happens on the event loop, so that a slow disk
slows players down instead of filling memory. Session ids and tokens are never written.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
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
    hash_observation,
    timestamp,
)
from ludus.env.sessions.interface import (
    Connection,
    ImmediateCalls,
    Load,
    OpenArgs,
    Opened,
    SessionEvents,
    Sessions,
)
from ludus.env.sessions.metrics import SessionCounts, WorkerCounts
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.env.targets.targets import TargetFactory
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import (
    ActionError,
    EnvError,
    ExecutionError,
    InfrastructureError,
    ToolError,
)

MAX_EPISODE_BYTES = 8 * 1024 * 1024
"""What is kept of one running episode; it is written in full up to there."""
MAX_RUNNING_BYTES = 256 * 1024 * 1024
"""What is kept of all of them as JSON; beyond it the longest is written as it stands."""
MAX_RUNNING = 16_384
"""Episodes that run at once; the oldest beyond these is taken for abandoned."""
_REPEATABLE = (ActionError, ExecutionError, ToolError)
"""Errors that come from the environment, so that playing again meets them again."""


@dataclass(slots=True, eq=False)
class _Running:
    """An episode that has not ended."""

    episode: RecordedEpisode
    step_index: int = 0
    num_bytes: int = 0
    is_cut: bool = False
    """It has grown too long, and later steps are left out."""
    is_written: bool = False
    num_calls: int = 0
    """Calls under way: the end of the session waits for their answers to be noted."""
    end_reason: str = ""
    """Why the session ended under a call."""


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What is recorded."""

    full: bool = False
    """Also whole observations, not just their hashes."""
    built_from: TargetFactory | None = None
    """What makes the environment again, for replays that name none."""
    first_seed: int | None = None
    """Resets without a seed take this one, then the next; None draws them."""
    max_file_bytes: int = MAX_FILE_BYTES
    max_episode_bytes: int = MAX_EPISODE_BYTES
    max_running_bytes: int = MAX_RUNNING_BYTES


class RecordingSessions:
    """The sessions of `inner`, with every episode written down; implements `Sessions`.

    Args:
        path: a file that ends in .jsonl, or a folder that gets one file for each server.
    """

    def __init__(
        self, inner: Sessions, path: Path | str, options: RecordingOptions | None = None
    ) -> None:
        self._inner = inner
        self._options = options or RecordingOptions()
        path = Path(path)
        if path.suffix != SUFFIX:
            path = path / f"{inner.description.server_id or 'episodes'}{SUFFIX}"
        self.file = RecordingFile(path, self._options.max_file_bytes)
        self._running: OrderedDict[str, _Running] = OrderedDict()
        self._num_bytes = 0
        """Of all that are not written yet."""
        self._of_tools_id: dict[str, str] = {}
        self._tools_ids: dict[str, str] = {}
        """The same by session, to forget them with it."""
        self._seeds = DefaultSeeds(self._options.first_seed)
        self._environment = self._describe()
        self._immediate = inner.immediate
        inner.events.on_end.append(self._on_end)

    @property
    def description(self) -> EnvironmentDescription:
        """What the environment is."""
        return self._inner.description

    @property
    def load(self) -> Load:
        """How full it is."""
        return self._inner.load

    @property
    def events(self) -> SessionEvents:
        """Whom it tells of its sessions."""
        return self._inner.events

    @property
    def counts(self) -> SessionCounts | None:
        """What has happened."""
        return self._inner.counts

    @property
    def workers(self) -> WorkerCounts | None:
        """Its worker processes."""
        return self._inner.workers

    @property
    def trouble(self) -> str:
        """Why it can serve no session now; empty where it can."""
        return self._inner.trouble

    @property
    def immediate(self) -> ImmediateCalls | None:
        """The short way, recorded too, where the inner sessions have one."""
        return None if self._immediate is None else self

    @property
    def num_running(self) -> int:
        """Episodes that have begun and not ended."""
        return len(self._running)

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> Opened:
        """A new session; see `Sessions`."""
        if args.reset is not None:
            args = replace(args, reset=self._seeds.fill(args.reset))
        opened = await self._inner.open(args, connection)
        self._begin_opened(opened, args)
        return opened

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[Opened]:
        """Sessions on one seed; see `Sessions`."""
        args = replace(args, reset=self._seeds.fill(args.reset or ResetArgs()))
        group = await self._inner.open_group(args, size, connection, session_ids)
        for opened in group:
            self._begin_opened(opened, args)
        return group

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        args = self._end_and_seed(session_id, args)
        result = await self._inner.reset(session_id, args)
        self._begin(session_id, args, result)
        return result

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The same without a wait."""
        assert self._immediate is not None, "there is no short way"
        args = self._end_and_seed(session_id, args)
        result = self._immediate.reset_now(session_id, args)
        self._begin(session_id, args, result)
        return result

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action; see `Sessions`."""
        running = self._running.get(session_id)
        if running is None:
            return await self._inner.step(session_id, action, step_index, timeout_s)
        with self._noting(session_id, running, _call_of(action)) as step:
            result = await self._inner.step(session_id, action, step_index, timeout_s)
            self._note_result(running, step, result)
        return result

    def step_now(self, session_id: str, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """The same without a wait."""
        assert self._immediate is not None, "there is no short way"
        running = self._running.get(session_id)
        if running is None:
            return self._immediate.step_now(session_id, action, step_index)
        with self._noting(session_id, running, _call_of(action)) as step:
            result = self._immediate.step_now(session_id, action, step_index)
            self._note_result(running, step, result)
        return result

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        return await self._inner.state(session_id)

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """What a tool returned; it may have changed the episode, so it is recorded too."""
        driving_id = self._of_tools_id.get(session_id, session_id)
        running = self._running.get(driving_id)
        if running is None:
            return await self._inner.call_tool(session_id, name, arguments)
        called = RecordedStep(tool=name, arguments=arguments)
        with self._noting(driving_id, running, called) as step:
            result = await self._inner.call_tool(session_id, name, arguments)
            step.tool_hash = hash_json(orjson.loads(result))
            self._note(running, step)
        return result

    async def close(self, session_id: str) -> None:
        """End a session; its episode is written."""
        await self._inner.close(session_id)
        self._end(session_id, "closed")

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        """End a session after its `linger_s` unless it is called again before."""
        await self._inner.detach(session_id, connection)

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        """Let those among these sessions that linger go with a connection."""
        self._inner.attach(session_ids, connection)

    def release(self, connection: Connection) -> None:
        """End or detach what goes with a connection that ended."""
        self._inner.release(connection)

    def drain(self) -> None:
        """Take no new sessions from now on."""
        self._inner.drain()

    def finish(self, reason: str = "the server stopped") -> None:
        """Write the episodes that still run and close the file; for the end of a server."""
        for session_id, running in list(self._running.items()):
            running.end_reason = running.end_reason or reason
            self._write(session_id, running)
        self.file.close()

    def _describe(self) -> RecordedEnvironment:
        description, built_from = self._inner.description, self._options.built_from
        return RecordedEnvironment(
            name=description.name,
            version=description.version,
            target=built_from.target if built_from else "",
            options=built_from.options if built_from else description.options,
        )

    def _end_and_seed(self, session_id: str, args: ResetArgs) -> ResetArgs:
        self._end(session_id, "reset")
        return self._seeds.fill(args)

    def _on_end(self, session_id: str, why: SessionTombstone) -> None:
        self._of_tools_id.pop(self._tools_ids.pop(session_id, ""), None)
        self._end(session_id, why.reason)

    def _begin_opened(self, opened: Opened, args: OpenArgs) -> None:
        if opened.tools_session_id:
            self._of_tools_id[opened.tools_session_id] = opened.session_id
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
            first=self._result(first),
            started_at=timestamp(),
        )
        running = self._running[session_id] = _Running(episode, first.step_index)
        self._count(running, len(episode.model_dump_json(exclude_none=True)))
        if len(self._running) > MAX_RUNNING:
            self._end(next(iter(self._running)), "abandoned")

    def _count(self, running: _Running, num_bytes: int) -> None:
        running.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._running and self._num_bytes > self._options.max_running_bytes:
            longest = max(self._running, key=lambda one: self._running[one].num_bytes)
            self._running[longest].end_reason = "unfinished; too much is recorded at once"
            self._write(longest, self._running[longest])

    def _result(self, result: EncodedResult) -> RecordedResult:
        observation = orjson.loads(result.observation_json)
        return RecordedResult(
            observation_hash=hash_observation(observation, result.tensors),
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            success=result.success,
            observation=observation if self._options.full else None,
        )

    @contextlib.contextmanager
    def _noting(
        self, session_id: str, running: _Running, step: RecordedStep
    ) -> Iterator[RecordedStep]:
        """The step while its call is made: notes an error, and puts off the episode's end."""
        running.num_calls += 1
        try:
            yield step
        except EnvError as error:
            self._note_error(running, step, error)
            raise
        finally:
            running.num_calls -= 1
            if running.end_reason and not running.num_calls:
                self._write(session_id, running)

    def _note_error(self, running: _Running, step: RecordedStep, error: EnvError) -> None:
        if isinstance(error, _REPEATABLE):
            step.error = str(error.code)
            self._note(running, step)
        elif isinstance(error, InfrastructureError):
            running.end_reason = running.end_reason or f"lost: {error.code}"

    def _note_result(self, running: _Running, step: RecordedStep, result: EncodedResult) -> None:
        if result.step_index != running.step_index + 1:  # a repeat
            return
        running.step_index += 1
        step.result = self._result(result)
        self._note(running, step)
        if result.done:
            running.end_reason = "terminated" if result.terminated else "truncated"

    def _note(self, running: _Running, step: RecordedStep) -> None:
        if running.is_cut or running.is_written:
            return
        num_bytes = len(step.model_dump_json(exclude_none=True))
        if running.num_bytes + num_bytes > self._options.max_episode_bytes:
            running.is_cut = True
            return
        running.episode.steps.append(step)
        self._count(running, num_bytes)

    def _end(self, session_id: str, reason: str) -> None:
        """Write the session's episode if one runs; also called when sessions end by themselves."""
        running = self._running.get(session_id)
        if running is None:
            return
        running.end_reason = running.end_reason or reason
        if not running.num_calls:
            self._write(session_id, running)

    def _write(self, session_id: str, running: _Running) -> None:
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


def _call_of(action: bytes | str) -> RecordedStep:
    if isinstance(action, str):
        return RecordedStep(text=action)
    try:
        return RecordedStep(action=orjson.loads(action))
    except orjson.JSONDecodeError:  # refused as malformed, which a replay does not repeat
        return RecordedStep()
