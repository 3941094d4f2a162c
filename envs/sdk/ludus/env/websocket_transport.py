"""The client's WebSocket wire: OpenEnv's `/ws`, one connection per session.

Drives any OpenEnv server from 0.2 on. Extras (text, step numbers, `terminated` apart from
`truncated`) are asked for only when the server's /metadata advertises `ludus`: stock
servers refuse unknown keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from ludus.env.encoding import ResetArgs
from ludus.env.grpc_messages import MAX_MESSAGE_BYTES
from ludus.env.openenv_messages import read_tensors_json
from ludus.env.transport import ConnectOptions, StepCall, retry_until
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, TextView, Tool
from ludus.proto.errors import (
    AuthenticationError,
    CallTimeoutError,
    EnvError,
    InvalidCallError,
    SessionLostError,
    UnavailableError,
    error_from_wire,
)

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class WebSocketTransport:
    """A server's address and what it advertises; each session has its own connection."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._http_address = _http_address(options.address)
        self._headers = {}
        if options.authorization:
            self._headers["authorization"] = options.authorization
        self._metadata: JsonObject | None = None
        self._sessions: set[WebSocketSession] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, patience_s: float) -> None:
        """Returns when the server has said what it is."""
        self._metadata = await retry_until(lambda: self._get("/metadata"), patience_s)

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment; stock servers know less."""
        metadata, schema = await asyncio.gather(self._get("/metadata"), self._get("/schema"))
        ludus = metadata.get("ludus") or {}
        reset_options = ludus.get("reset_options")
        return EnvironmentDescription(
            name=metadata.get("name") or "",
            description=metadata.get("description") or "",
            version=metadata.get("version") or "",
            action_schema=schema.get("action") or {},
            observation_schema=schema.get("observation") or {},
            state_schema=schema.get("state") or {},
            has_text_view=ludus.get("has_text_view", False),
            max_sessions=ludus.get("max_sessions", 0),
            options=ludus.get("options", {}),
            reset_options=None if reset_options is None else frozenset(reset_options),
            is_deterministic=ludus.get("is_deterministic", False),
            tools=[Tool(**tool) for tool in ludus.get("tools", [])],
            server_id=ludus.get("server_id", ""),
        )

    async def open(
        self, reset: ResetArgs | None, close_when_done: bool
    ) -> tuple[WebSocketSession, StepResult | None]:
        """A new connection, with its first result when a reset was asked for."""
        socket = await retry_until(self._open_socket, self._options.reconnect_timeout_s)
        session = WebSocketSession(socket, self, self._options, close_when_done)
        self._sessions.add(session)
        try:
            if reset is not None:
                return session, await session.reset(reset)
            await session.state()  # a full server refuses only the first call
        except BaseException:
            session.abandon()
            raise
        return session, None

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One result or error per call, in order; each travels on its own connection."""
        return await asyncio.gather(*(_step_or_error(call) for call in calls))

    async def close(self) -> None:
        """Ends all connections."""
        for session in list(self._sessions):
            session.abandon()
        while self._closing:
            await asyncio.gather(*self._closing)

    @property
    def has_extras(self) -> bool:
        """True when the server understands our extras."""
        return bool(self._metadata and "ludus" in self._metadata)

    def forget(self, session: WebSocketSession, socket: ClientConnection) -> None:
        """Closes a session's connection in the background."""
        if session in self._sessions:
            self._sessions.remove(session)
            task = asyncio.get_running_loop().create_task(socket.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _open_socket(self) -> ClientConnection:
        address = "ws" + self._http_address.removeprefix("http") + "/ws"
        try:
            return await connect(
                address + ("?ludus=1" if self.has_extras else ""),
                additional_headers=self._headers,
                compression=None,
                max_size=16 * MAX_MESSAGE_BYTES,
                open_timeout=self._options.timeout_s,
                proxy=None,
            )
        except InvalidStatus as error:
            if error.response.status_code in (401, 403):
                raise self._refused() from None
            raise self._unavailable(error) from error
        except (OSError, InvalidHandshake) as error:
            raise self._unavailable(error) from error

    async def _get(self, path: str) -> JsonObject:
        """The JSON object at the path; empty when the server has no such path."""
        request = urllib.request.Request(self._http_address + path, headers=self._headers)
        timeout_s = min(self._options.timeout_s, 10.0)
        try:
            body = await asyncio.to_thread(_read_url, request, timeout_s)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise self._refused() from None
            return {}
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            found = json.loads(body)
        except ValueError as error:
            raise self._unavailable(error) from error
        return found if isinstance(found, dict) else {}

    def _refused(self) -> AuthenticationError:
        return AuthenticationError(
            f"{self._options.address} refused the token; pass its token to the client"
        )

    def _unavailable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"expected an environment server at {self._options.address}, could not reach it:"
            f" {error}; check the address and that the server runs"
        )


class WebSocketSession:
    """One connection, one session."""

    def __init__(
        self,
        socket: ClientConnection,
        transport: WebSocketTransport,
        options: ConnectOptions,
        close_when_done: bool,
    ) -> None:
        self.session_id = str(socket.id)
        self._socket = socket
        self._transport = transport
        self._options = options
        self._close_when_done = close_when_done

    async def reset(self, args: ResetArgs) -> StepResult:
        """The first result of a new episode."""
        data = dict(args.options)
        if args.seed is not None:
            data["seed"] = args.seed
        if args.episode_id:
            data["episode_id"] = args.episode_id
        return _read_result(await self._call({"type": "reset", "data": data}), 0)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result of an action: bytes are JSON, a str is text."""
        message: JsonObject = {"type": "step"}
        if isinstance(action, bytes):
            message["data"] = orjson.Fragment(action)
        if self._transport.has_extras:
            message["step_index"] = step_index
        if isinstance(action, str):
            if not self._transport.has_extras:
                raise InvalidCallError(
                    f"expected a JSON action: {self._options.address} is a stock OpenEnv server"
                    " and reads no text"
                )
            message["text"] = action
        result = _read_result(await self._call(message), step_index)
        if self._close_when_done and result.done:
            self.abandon()
        return result

    async def state(self) -> JsonObject:
        """The environment's state."""
        return await self._call({"type": "state"})

    async def close(self) -> None:
        """Returns when the connection is closed, which frees the session."""
        self.abandon()
        await self._socket.wait_closed()

    def abandon(self) -> None:
        """Closes the connection without waiting for it."""
        self._transport.forget(self, self._socket)

    async def _call(self, message: JsonObject) -> JsonObject:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                reply = orjson.loads(await self._exchange(orjson.dumps(message).decode()))
        except TimeoutError:
            raise CallTimeoutError(
                f"expected an answer from {self._options.address} within"
                f" {self._options.timeout_s:g} s, got none; the session is dropped"
            ) from None
        except ConnectionClosed as error:
            raise SessionLostError(
                f"session lost: the connection to {self._options.address} broke: {error};"
                " open a new one"
            ) from None
        data = reply["data"]
        if reply["type"] == "error":
            raise error_from_wire(data["code"], data["message"])
        return data

    async def _exchange(self, text: str) -> str | bytes:
        # A server that refuses says why in a frame that waits to be read.
        with contextlib.suppress(ConnectionClosed):
            await self._socket.send(text)
        return await self._socket.recv()


async def _step_or_error(call: StepCall) -> StepResult | EnvError:
    try:
        return await call.session.step(call.action, call.step_index)
    except EnvError as error:
        return error


def _read_result(data: JsonObject, step_index: int) -> StepResult:
    """The result in a payload; stock servers send neither flags nor numbers."""
    reward: Any = data.get("reward")
    text = data.get("text")
    return StepResult(
        observation=data["observation"],
        reward=None if reward is None else float(reward),
        terminated=data["terminated"] if "terminated" in data else bool(data.get("done")),
        truncated=data.get("truncated", False),
        info=data.get("info", {}),
        step_index=data.get("step_index", step_index),
        text=TextView(text["messages"], text["legal_answers"]) if text else None,
        tensors=read_tensors_json(data["tensors"]) if "tensors" in data else {},
    )


def _http_address(address: str) -> str:
    base = address.rstrip("/").removesuffix("/ws")
    return "http" + base.removeprefix("ws") if base.startswith("ws") else base


def _read_url(request: urllib.request.Request, timeout_s: float) -> bytes:
    with _DIRECT.open(request, timeout=timeout_s) as response:
        return response.read()
