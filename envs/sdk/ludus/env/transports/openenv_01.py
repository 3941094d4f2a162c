"""The client's wire to OpenEnv 0.1 servers: stateful HTTP, one environment per process.

    POST /reset {}               --> {"observation", "reward", "done"}
    POST /step  {"action": ...}  --> the same
    GET  /state                  --> the state

Everybody who calls such a server plays in the same episode; this client at least opens one
session at a time. The server knows no seeds, no reset options, no step numbers and no
texts, and it answers every fault with a bare 500.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import NoReturn
from urllib.error import HTTPError

import orjson

from ludus.env.encoding import ResetArgs, read_success
from ludus.env.messages.openenv import upstream_metadata
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.discovery import DiscoveredServer, HttpClient, refusal, unreachable
from ludus.env.transports.interface import (
    ConnectOptions,
    OpenedWire,
    StepCall,
    retry_until,
    step_or_error,
)
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import (
    CallTimeoutError,
    CapacityError,
    ConfigError,
    EnvError,
    ExecutionError,
    InvalidCallError,
    SessionLostError,
    ToolError,
)


class LegacyHttpTransport:
    """A 0.1 server and the one session that this client may have there."""

    def __init__(self, options: ConnectOptions, discovered: DiscoveredServer | None = None) -> None:
        self.options = options
        self.http = HttpClient(options)
        self._discovered = discovered
        self._session: LegacyHttpSession | None = None

    async def connect(self, patience_s: float) -> None:
        """Wait for the server to answer."""
        if self._discovered is None:
            self._discovered = await retry_until(self.http.discover, patience_s)

    async def describe(self) -> EnvironmentDescription:
        """What is known of the environment: nothing but that there is one of it."""
        return EnvironmentDescription(
            name="",
            description="An OpenEnv 0.1 server, which describes nothing.",
            version="",
            action_schema={},
            observation_schema={},
            state_schema={},
            has_text_view=False,
            max_sessions=1,
            reset_options=frozenset(),
        )

    async def open(self, args: OpenArgs) -> OpenedWire:
        """The one session of this client.

        Raises:
            CapacityError: it is taken.
            ConfigError: the session is to outlive its connection: there is none.
        """
        if args.linger_s > 0:
            raise ConfigError(
                f"expected linger_s 0 for {self.options.address}, got {args.linger_s:g}: OpenEnv"
                " 0.1 knows no sessions that could outlive a connection"
            )
        if self._session is not None:
            raise self._taken(1)
        session = self._session = LegacyHttpSession(self, args.close_when_done)
        try:
            first = None if args.reset is None else await session.reset(args.reset)
        except BaseException:
            session.abandon()
            raise
        return session, first

    async def open_group(self, args: OpenArgs, size: int) -> list[OpenedWire]:
        """A group of one; more do not fit on such a server."""
        if size != 1:
            raise self._taken(size)
        return [await self.open(args)]

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """The outcomes, one call after another."""
        return [await step_or_error(call) for call in calls]

    async def close(self) -> None:
        """Let the session go; the server keeps its environment."""
        self._session = None

    def forget(self, session: LegacyHttpSession) -> None:
        """Make room for another session."""
        if self._session is session:
            self._session = None

    def holds(self, session: LegacyHttpSession) -> bool:
        """True while the session is the one of this client."""
        return self._session is session

    def _taken(self, size: int) -> CapacityError:
        return CapacityError(
            f"expected at most 1 session on {self.options.address}, an OpenEnv 0.1 server with one"
            f" environment per process, got {size + (self._session is not None)}; close the other"
            " first, start more servers, or rebuild the environment with OpenEnv 0.2 or later"
        )


class LegacyHttpSession:
    """The episode that the server's one environment plays."""

    def __init__(self, transport: LegacyHttpTransport, close_when_done: bool) -> None:
        self.session_id = uuid.uuid4().hex
        self.tools_session_id = ""
        self._transport = transport
        self._close_when_done = close_when_done

    async def reset(self, args: ResetArgs) -> StepResult:
        """The first result of a new episode.

        Raises:
            ConfigError: a seed or an option is given, which the server would ignore.
        """
        options = self._transport.options
        if args.options:
            raise ConfigError(
                f"expected no reset options for {options.address}, got"
                f" {', '.join(sorted(args.options))}: OpenEnv 0.1 servers ignore them; configure"
                " the environment where it is started"
            )
        body: JsonObject = {}
        if args.seed is not None:
            if not options.allow_ignored_seed:
                raise ConfigError(
                    f"expected no seed for {options.address}, got {args.seed}: OpenEnv 0.1 servers"
                    " ignore seeds, so episodes cannot be repeated and groups do not begin alike;"
                    " leave it out, or connect with allow_ignored_seed=True"
                )
            body["seed"] = args.seed
        return self._read_result(await self._call("POST", "/reset", orjson.dumps(body)), 0)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result of a JSON action; a text cannot be sent."""
        if isinstance(action, str):
            raise InvalidCallError(
                f"expected a JSON action: {self._transport.options.address} is an upstream OpenEnv"
                " server and reads no text"
            )
        body = orjson.dumps({"action": orjson.Fragment(action)})
        return self._read_result(await self._call("POST", "/step", body), step_index)

    async def state(self) -> JsonObject:
        """The environment's state."""
        return await self._call("GET", "/state", None)

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """Refuse: OpenEnv 0.1 knows no tools."""
        raise ToolError(
            f"expected no tools on an OpenEnv 0.1 server, got a call of '{name}'; rebuild the "
            "environment with OpenEnv 0.2 or later"
        )

    async def close(self) -> None:
        """Make room for another session of this client."""
        self.abandon()

    def abandon(self) -> None:
        """Make room for another session of this client."""
        self._transport.forget(self)

    async def _call(self, method: str, path: str, body: bytes | None) -> JsonObject:
        """The JSON object that the server answers; each answer comes on its own connection."""
        options = self._transport.options
        if not self._transport.holds(self):
            raise SessionLostError("session lost: it was closed; open a new one")
        try:
            async with asyncio.timeout(options.timeout_s):
                answer = await self._transport.http.call(method, path, body, options.timeout_s)
        except TimeoutError:
            raise CallTimeoutError(
                f"expected an answer from {options.address} within {options.timeout_s:g} s,"
                " got none; the session is dropped"
            ) from None
        except HTTPError as error:
            self._raise(error, path)
        except OSError as error:
            raise unreachable(options, error) from error
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise unreachable(options, error) from error
        if not isinstance(found, dict):
            raise ExecutionError(f"expected a JSON object from {path}, got {answer[:80]!r}")
        return found

    def _raise(self, error: HTTPError, path: str) -> NoReturn:
        body = error.read()
        if error.code == 500:
            raise ExecutionError(
                f"{path} failed on {self._transport.options.address}: the environment raised, or"
                " the action does not fit it (OpenEnv 0.1 does not say which); see the server's log"
            ) from None
        if error.code in (400, 422):
            text = body[:500].decode(errors="replace")
            raise InvalidCallError(f"{path} was refused: {text}") from None
        wait = error.headers.get("retry-after")
        raise refusal(self._transport.options, error.code, wait, body) from None

    def _read_result(self, data: JsonObject, step_index: int) -> StepResult:
        reward = data.get("reward")
        is_done = bool(data.get("done"))
        if is_done and self._close_when_done:
            self.abandon()
        return StepResult(
            observation=data.get("observation") or {},
            reward=None if reward is None else float(reward),
            terminated=is_done,
            step_index=step_index,
            success=read_success(upstream_metadata(data), is_done=is_done),
        )
