"""The client's wire to OpenEnv 0.1 servers: stateful HTTP, one environment per process.

    POST /reset {}               --> {"observation", "reward", "done"}
    POST /step  {"action": ...}  --> the same
    GET  /state                  --> the state

All callers of such a server play in the same episode, so this client opens only one session at a
time. The server supports no seeds, reset options, step numbers or texts, and it reports every
failure as a bare status 500.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import NoReturn
from urllib.error import HTTPError

import orjson

from ludus.env.encoding import ResetArgs, read_success
from ludus.env.messages.openenv import upstream_metadata
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.discovery import DiscoveredServer, HttpClient, refusal, unreachable
from ludus.env.transports.interface import (
    OpenedWire,
    RemoteServer,
    retry_unavailable,
)
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import (
    CallTimeoutError,
    CapacityError,
    ConfigError,
    ExecutionError,
    InvalidCallError,
    SessionLostError,
    ToolError,
)


class LegacyHttpTransport:
    """A connection to an OpenEnv 0.1 server, with at most one session."""

    def __init__(self, server: RemoteServer, discovered: DiscoveredServer | None = None) -> None:
        self.server = server
        self.http = HttpClient(server)
        self._discovered = discovered
        self._session: LegacyHttpSession | None = None

    async def connect(self, timeout_s: float) -> None:
        """Wait for the server to respond."""
        if self._discovered is None:
            self._discovered = await retry_unavailable(self.http.discover, timeout_s)

    async def describe(self) -> EnvironmentDescription:
        """Return an almost empty description, because the server does not describe itself."""
        return EnvironmentDescription(
            name="",
            description="An OpenEnv 0.1 server, which does not describe itself.",
            version="",
            action_schema={},
            observation_schema={},
            state_schema={},
            has_text_view=False,
            max_sessions=1,
            reset_options=frozenset(),
        )

    async def open(self, args: OpenArgs) -> OpenedWire:
        """Open the client's only session.

        Raises:
            CapacityError: the session is already open.
            ConfigError: `linger_s` is set, which OpenEnv 0.1 does not support.
        """
        if args.linger_s > 0:
            raise ConfigError(
                f"linger_s must be 0 for {self.server.address}, got {args.linger_s:g}: OpenEnv 0.1"
                " closes a session with its connection"
            )
        if self._session is not None:
            raise self._capacity_error(1)
        session = self._session = LegacyHttpSession(self, args.close_when_done)
        try:
            first_result = None if args.reset is None else await session.reset(args.reset)
        except BaseException:
            session.abandon()
            raise
        return session, first_result

    async def open_group(self, args: OpenArgs, size: int) -> list[OpenedWire]:
        """Open a group of one session.

        Raises:
            CapacityError: the size is not 1, or the session is already open.
        """
        if size != 1:
            raise self._capacity_error(size)
        return [await self.open(args)]

    async def close(self) -> None:
        """Release the session; the server keeps its environment."""
        self._session = None

    def forget(self, session: LegacyHttpSession) -> None:
        """Release the session, so that another one can be opened."""
        if self._session is session:
            self._session = None

    def is_open(self, session: LegacyHttpSession) -> bool:
        """Return True while this is the client's open session."""
        return self._session is session

    def _capacity_error(self, size: int) -> CapacityError:
        return CapacityError(
            f"{self.server.address}, an OpenEnv 0.1 server, supports only 1 session, but"
            f" {size + (self._session is not None)} are needed; close the other session first,"
            " start more servers, or rebuild the environment with OpenEnv 0.2 or later"
        )


class LegacyHttpSession:
    """The episode of an OpenEnv 0.1 server's only environment."""

    def __init__(self, transport: LegacyHttpTransport, close_when_done: bool) -> None:
        self.session_id = uuid.uuid4().hex
        self.tools_session_id = ""
        self._transport = transport
        self._close_when_done = close_when_done

    async def reset(self, args: ResetArgs) -> StepResult:
        """Start a new episode and return its first result.

        Raises:
            ConfigError: a seed or an option is set, which the server would ignore.
        """
        address = self._transport.server.address
        if args.options:
            raise ConfigError(
                f"{address} would ignore the reset options {', '.join(sorted(args.options))},"
                " because it is an OpenEnv 0.1 server; set the options when the server is started"
            )
        body: JsonObject = {}
        if args.seed is not None:
            if not self._transport.server.options.allow_ignored_seed:
                raise ConfigError(
                    f"{address} would ignore the seed {args.seed}, because it is an OpenEnv 0.1"
                    " server: episodes cannot be repeated, and the sessions of a group start"
                    " differently; remove the seed, or connect with allow_ignored_seed=True"
                )
            body["seed"] = args.seed
        return self._read_result(await self._call("POST", "/reset", orjson.dumps(body)), 0)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """Return the result of a JSON action; text is not supported."""
        if isinstance(action, str):
            raise InvalidCallError(
                f"{self._transport.server.address}, an OpenEnv 0.1 server, does not accept text;"
                " send a JSON action"
            )
        body = orjson.dumps({"action": orjson.Fragment(action)})
        return self._read_result(await self._call("POST", "/step", body), step_index)

    async def state(self) -> JsonObject:
        """Return the environment's state."""
        return await self._call("GET", "/state", None)

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """Raise ToolError, because OpenEnv 0.1 does not support tools."""
        raise ToolError(
            f"cannot call tool '{name}': an OpenEnv 0.1 server has no tools; rebuild the"
            " environment with OpenEnv 0.2 or later"
        )

    async def close(self) -> None:
        """Release the client's session."""
        self.abandon()

    def abandon(self) -> None:
        """Release the client's session."""
        self._transport.forget(self)

    async def _call(self, method: str, path: str, body: bytes | None) -> JsonObject:
        """Send a request on a new connection and return the JSON object in the response."""
        address, timeout_s = (
            self._transport.server.address,
            self._transport.server.options.timeout_s,
        )
        if not self._transport.is_open(self):
            raise SessionLostError("the session was closed; open a new session")
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._transport.http.call(method, path, body, timeout_s)
        except TimeoutError:
            raise CallTimeoutError(
                f"{address} did not respond within {timeout_s:g} s; the session is closed"
            ) from None
        except HTTPError as error:
            self._raise_status_error(error, path)
        except OSError as error:
            raise unreachable(address, error) from error
        try:
            content = json.loads(response)
        except ValueError as error:
            raise unreachable(address, error) from error
        if not isinstance(content, dict):
            raise ExecutionError(f"expected a JSON object from {path}, got {response[:80]!r}")
        return content

    def _raise_status_error(self, error: HTTPError, path: str) -> NoReturn:
        address, body = self._transport.server.address, error.read()
        if error.code == 500:
            raise ExecutionError(
                f"{path} failed on {address}: the environment raised an error, or the action is"
                " not valid (OpenEnv 0.1 does not report which); see the server's log"
            ) from None
        if error.code in (400, 422):
            text = body[:500].decode(errors="replace")
            raise InvalidCallError(f"{path} was refused: {text}") from None
        raise refusal(address, error.code, error.headers.get("retry-after"), body) from None

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
