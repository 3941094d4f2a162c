"""Recording what is played: `Sessions` that write each finished episode as one line of JSON.

    wire --> RecordingSessions --> Sessions that play
                   | an episode has ended, or was abandoned
                   v
             RecordingFile: <file>.jsonl, a new one when it is full

Every recording can be played again (`replaying`): a reset without a seed gets one here.
Nobody waits but for the write itself, which happens on the event loop, so that a slow disk
slows players down instead of filling memory. Session ids and tokens are never written.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import orjson

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.recording.format import (
    RecordedEnvironment,
    RecordedEpisode,
    RecordedResult,
    RecordedStep,
    hash_of_json,
    hash_of_observation,
)
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.interface import Load, OpenArgs, Opened, Owner, SessionEvents, Sessions
from ludus.env.targets.targets import TargetFactory
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import (
    ActionError,
    EnvError,
    ExecutionError,
    InfrastructureError,
    ToolError,
)

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_EPISODE_BYTES = 8 * 1024 * 1024
"""What is kept of one running episode; it is written in full up to there."""
MAX_RUNNING = 16_384
"""Episodes that run at once; the oldest beyond these is taken for abandoned."""
_SEED_BITS = 32
_SUFFIX = ".jsonl"
_REPEATABLE = (ActionError, ExecutionError, ToolError)
"""Errors that come from the environment, so that playing again meets them again."""


class RecordingFile:
    """Lines appended to `<name>.jsonl`; a full file is set aside as `<name>.0001.jsonl`."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self.num_lost = 0
        """Episodes that could not be written."""
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = None

    def append(self, line: bytes) -> None:
        """Writes a line; a disk that refuses loses it, which is logged."""
        try:
            if self._file is None:
                self._file = self._open()
            elif self._file.tell() + len(line) > self._max_bytes:
                self._set_aside()
                self._file = self._open()
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            self.num_lost += 1
            _log.error("an episode was not recorded in %s: %s", self.path, error)

    def close(self) -> None:
        """Closes the file; what was appended is in it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab+")
        if file.tell():  # a killed process may have left half a line
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file

    def _set_aside(self) -> None:
        self.close()
        number = 1
        while (aside := self.path.with_suffix(f".{number:04d}{_SUFFIX}")).exists():
            number += 1
        self.path.rename(aside)


@dataclass(slots=True, eq=False)
class _Running:
    """An episode that has not ended."""

    episode: RecordedEpisode
    step_index: int = 0
    num_bytes: int = 0
    is_cut: bool = False
    """It has grown too long, and later steps are left out."""
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


@dataclass(slots=True)
class _Seeds:
    next: int | None

    def draw(self) -> int:
        if self.next is None:
            return secrets.randbits(_SEED_BITS)
        self.next += 1
        return self.next - 1


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
        if path.suffix != _SUFFIX:
            path = path / f"{inner.description.server_id or 'episodes'}{_SUFFIX}"
        self.file = RecordingFile(path, self._options.max_file_bytes)
        self._running: OrderedDict[str, _Running] = OrderedDict()
        self._seeds = _Seeds(self._options.first_seed)
        self._environment = self._describe()
        # A gateway has no events of its own: there an episode ends with the call that shows it.
        self.events: SessionEvents = getattr(inner, "events", None) or SessionEvents()
        self.events.on_end.append(self._end)

    @property
    def description(self) -> EnvironmentDescription:
        """What the environment is."""
        return self._inner.description

    @property
    def load(self) -> Load:
        """How full it is."""
        return self._inner.load

    @property
    def counts(self) -> Any:
        """What a metered core has counted; None where nothing counts."""
        return getattr(self._inner, "counts", None)

    @property
    def workers(self) -> Any:
        """Worker processes; None where sessions run in the server itself."""
        return getattr(self._inner, "workers", None)

    @property
    def num_running(self) -> int:
        """Episodes that have begun and not ended."""
        return len(self._running)

    async def open(self, args: OpenArgs, owner: Owner | None = None) -> Opened:
        """A new session; see `Sessions`."""
        args = self._seeded_open(args)
        opened = await self._inner.open(args, owner)
        self._begin_opened(opened, args)
        return opened

    async def open_group(
        self, args: OpenArgs, size: int, owner: Owner | None = None
    ) -> list[Opened]:
        """Sessions on one seed; see `Sessions`."""
        args = self._seeded_open(replace(args, reset=args.reset or ResetArgs()))
        return self._begin_group(await self._inner.open_group(args, size, owner), args)

    async def open_group_as(
        self, session_ids: list[str], args: OpenArgs, owner: Owner | None = None
    ) -> list[Opened]:
        """The same under given ids; for the sessions of one server."""
        assert isinstance(self._inner, SessionCore), "a gateway gives ids, it takes none"
        args = self._seeded_open(replace(args, reset=args.reset or ResetArgs()))
        return self._begin_group(await self._inner.open_group_as(session_ids, args, owner), args)

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        self._end(session_id, "reset")
        args = self._seeded(args)
        result = await self._inner.reset(session_id, args)
        self._begin(session_id, args, result)
        return result

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action; see `Sessions`."""
        running = self._running.get(session_id)
        if running is None:
            return await self._inner.step(session_id, action, step_index, timeout_s)
        with self._calling(session_id, running):
            try:
                result = await self._inner.step(session_id, action, step_index, timeout_s)
            except EnvError as error:
                self._note_error(running, _call_of(action), error)
                raise
            if result.step_index == running.step_index + 1:  # no repeat
                running.step_index += 1
                step = _call_of(action)
                step.result = self._result(result)
                self._note(running, step)
                if result.done:
                    running.end_reason = "terminated" if result.terminated else "truncated"
        return result

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        return await self._inner.state(session_id)

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """What a tool returned; it may have changed the episode, so it is recorded too."""
        running = self._running.get(session_id)
        if running is None:
            return await self._inner.call_tool(session_id, name, arguments)
        step = RecordedStep(tool=name, arguments=arguments)
        with self._calling(session_id, running):
            try:
                result = await self._inner.call_tool(session_id, name, arguments)
            except EnvError as error:
                self._note_error(running, step, error)
                raise
            step.tool_hash = hash_of_json(orjson.loads(result))
            self._note(running, step)
        return result

    async def close(self, session_id: str) -> None:
        """Ends a session; its episode is written."""
        await self._inner.close(session_id)
        self._end(session_id, "closed")

    async def detach(self, session_id: str) -> None:
        """Ends a session after its `linger_s` unless it is called again before."""
        await self._inner.detach(session_id)

    @property
    def orphans(self) -> Set[str]:
        """Sessions that outlived their connection."""
        return getattr(self._inner, "orphans", frozenset())

    def adopt(self, session_id: str, owner: Owner) -> None:
        """Gives an orphan to the connection that calls it."""
        if isinstance(self._inner, SessionCore):
            self._inner.adopt(session_id, owner)

    def release(self, owner: Owner) -> None:
        """Ends or detaches what the owner opened."""
        self._inner.release(owner)

    def drain(self) -> None:
        """Takes no new sessions from now on."""
        if isinstance(self._inner, SessionCore):
            self._inner.drain()

    def finish(self, reason: str = "the server stopped") -> None:
        """Writes the episodes that still run and closes the file; for the end of a server."""
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

    def _seeded(self, args: ResetArgs) -> ResetArgs:
        return args if args.seed is not None else replace(args, seed=self._seeds.draw())

    def _seeded_open(self, args: OpenArgs) -> OpenArgs:
        return args if args.reset is None else replace(args, reset=self._seeded(args.reset))

    def _begin_opened(self, opened: Opened, args: OpenArgs) -> None:
        if args.reset is not None and opened.first is not None:
            self._begin(opened.session_id, args.reset, opened.first)

    def _begin_group(self, group: list[Opened], args: OpenArgs) -> list[Opened]:
        for opened in group:
            self._begin_opened(opened, args)
        return group

    def _begin(self, session_id: str, args: ResetArgs, first: EncodedResult) -> None:
        assert args.seed is not None, "every recorded reset has a seed"
        episode = RecordedEpisode(
            environment=self._environment,
            episode_id=args.episode_id or secrets.token_hex(8),
            seed=args.seed,
            reset_options=args.options,
            first=self._result(first),
            started_at=_now(),
        )
        self._running[session_id] = _Running(episode, first.step_index)
        if len(self._running) > MAX_RUNNING:
            self._end(next(iter(self._running)), "abandoned")

    def _result(self, result: EncodedResult) -> RecordedResult:
        observation = orjson.loads(result.observation_json)
        return RecordedResult(
            observation_hash=hash_of_observation(observation, result.tensors),
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            observation=observation if self._options.full else None,
        )

    @contextlib.contextmanager
    def _calling(self, session_id: str, running: _Running) -> Iterator[None]:
        """While it lasts, the end of the episode is put off."""
        running.num_calls += 1
        try:
            yield
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

    def _note(self, running: _Running, step: RecordedStep) -> None:
        if running.is_cut:
            return
        running.num_bytes += len(step.model_dump_json(exclude_none=True))
        if running.num_bytes > self._options.max_episode_bytes:
            running.is_cut = True
        else:
            running.episode.steps.append(step)

    def _end(self, session_id: str, reason: str) -> None:
        """Writes the session's episode if one runs; also called when sessions end by themselves."""
        running = self._running.get(session_id)
        if running is None:
            return
        running.end_reason = running.end_reason or reason
        if not running.num_calls:
            self._write(session_id, running)

    def _write(self, session_id: str, running: _Running) -> None:
        if self._running.get(session_id) is running:
            del self._running[session_id]
        episode = running.episode
        episode.ended_at = _now()
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


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
