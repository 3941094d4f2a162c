"""The client's wire to OpenEnv's protocol, and to Ludus servers by the same protocol.

    server                 calls                   extensions
    Ludus                  WebSocket `/ws`         text, step numbers, separate flags
    OpenEnv 0.2 or later   WebSocket `/ws`         none; the client renders the text from fields
    OpenEnv 0.1            HTTP, 1 session         none, and no seeds, reset options or tools

A session ends with its connection. Upstream servers reject unknown keys, so the client requests the
extensions of Ludus only if the server's /metadata contains `ludus`. All callers of an OpenEnv 0.1
server play in the same episode, so the client opens only one session at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from ludus.env.backoff import is_draining_error, retry_on_new_connection, retry_unavailable
from ludus.env.encoding import DefaultSeeds, ResetArgs, encode_json, read_success
from ludus.env.grpc.call_stream import ConnectionLostError
from ludus.env.limits import MAX_MESSAGE_BYTES, MAX_REPLY_BYTES
from ludus.env.messages.openenv import read_metadata, read_tensors_json, read_upstream_metadata
from ludus.env.security.tracing import make_trace_headers
from ludus.env.sessions.interface import OpenArgs
from ludus.env.text import FieldsText
from ludus.env.text.unicode import load_json
from ludus.env.transports.address import RemoteServer, ServerAddress
from ludus.env.transports.http import (
    DiscoveredServer,
    HttpChannel,
    HttpClient,
    make_refusal_error,
    make_unreachable_error,
)
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, TextView, ToolResult
from ludus.proto.errors import (
    ActionParseError,
    CallTimeoutError,
    CapacityError,
    ConfigError,
    EnvError,
    GroupMismatchError,
    InvalidCallError,
    SessionLostError,
    ToolError,
    make_wire_error,
)

_CLOSE_TIMEOUT_S = 2.0


class SocketChannel:
    """The calls of a session on its own connection, which ends the session when it is closed."""

    def __init__(self, socket: ClientConnection, address: ServerAddress) -> None:
        self._socket = socket
        self._address = address

    @classmethod
    async def open(cls, server: RemoteServer, query: str) -> SocketChannel:
        """Open a connection to the server's `/ws`.

        Args:
            query: part of the URL after `/ws`.
        """
        address, options = server.address, server.options
        headers = {"authorization": server.authorization} if server.authorization else {}
        tls_options: JsonObject = {"ssl": server.make_ssl_context()} if address.uses_tls else {}
        if tls_options and options.server_name:
            tls_options["server_hostname"] = options.server_name
        try:
            socket = await connect(
                f"{address.websocket_url}/ws{query}",
                additional_headers={**headers, **make_trace_headers()},
                compression=None,
                max_size=MAX_REPLY_BYTES,
                open_timeout=options.timeout_s,
                close_timeout=_CLOSE_TIMEOUT_S,
                proxy=None,
                **tls_options,
            )
        except InvalidStatus as error:
            response = error.response
            retry_after, body = response.headers.get("retry-after"), bytes(response.body or b"")
            raise make_refusal_error(address, response.status_code, retry_after, body) from None
        except (OSError, InvalidHandshake) as error:
            raise make_unreachable_error(address, error) from error
        return cls(socket, address)

    async def call(self, message: JsonObject) -> JsonObject:
        """Send a message and return the data of the reply."""
        encoded_message = encode_json(message, "a call")
        if len(encoded_message) > MAX_MESSAGE_BYTES:
            raise InvalidCallError(
                f"a call to {self._address} must have at most {MAX_MESSAGE_BYTES} bytes,"
                f" got {len(encoded_message)}; send less in one call"
            )
        try:
            # A server that refuses the session reports the reason in a frame that waits to be read.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(encoded_message, text=True)
            reply = load_json(await self._socket.recv())
        except ConnectionClosed as error:
            raise ConnectionLostError(
                f"session lost: the connection to {self._address} broke: {error}; open a new one"
            ) from None
        reply_data: JsonObject = reply["data"]
        if reply["type"] == "error":
            retry_after_s = reply_data.get("retry_after_s", 0.0)
            raise make_wire_error(reply_data["code"], reply_data["message"], retry_after_s)
        return reply_data

    async def close(self) -> None:
        """Close the connection."""
        await self._socket.close()


class OpenEnvTransport:
    """A server's address and description; each session has its own channel."""

    def __init__(self, client: HttpClient, discovered_server: DiscoveredServer) -> None:
        self.server = client.server
        self._client = client
        self._metadata, self._schema = discovered_server.metadata, discovered_server.schema
        self.is_legacy = discovered_server.is_legacy
        """True for OpenEnv 0.1."""
        self.sessions: set[OpenEnvSession] = set()
        self._close_tasks: set[asyncio.Task[None]] = set()

    @property
    def has_extensions(self) -> bool:
        """True if the server supports the extensions of Ludus."""
        return "ludus" in self._metadata

    @classmethod
    async def connect(cls, server: RemoteServer) -> OpenEnvTransport:
        """Return a transport once the server has described itself.

        Raises:
            UnavailableError: the server did not respond within `options.connect_timeout_s`.
        """
        client = HttpClient(server)
        timeout_s = server.options.connect_timeout_s
        return cls(client, await retry_unavailable(client.discover, timeout_s))

    async def describe(self) -> EnvironmentDescription:
        """Return the server's description; upstream servers provide only a part of it.

        Raises:
            ConfigError: a field of the description has a wrong type.
        """
        if not self.is_legacy:
            try:
                return read_metadata(self._metadata, self._schema)
            except ValueError as error:
                raise ConfigError(
                    f"expected an environment server at {self.server.address}, but its description "
                    f"is not valid: {error}"
                ) from error
        description = "An OpenEnv 0.1 server, which does not describe itself."
        extensions = {"max_sessions": 1, "reset_options": []}
        return read_metadata({"description": description, "ludus": extensions}, {})

    async def open(self, args: OpenArgs) -> tuple[OpenEnvSession, StepResult | None]:
        """Open a session, and return it with its first result if a reset was requested.

        If the server is draining, or ends the connection before the first result, the open is
        repeated on a new connection, which may reach another server.

        Raises:
            CapacityError: the only session of an OpenEnv 0.1 server is already open.
            ConfigError: `linger_s` is set, which this wire does not support.
        """
        if args.linger_s > 0:
            raise ConfigError(
                f"linger_s must be 0 for {self.server.address}, got {args.linger_s:g}: over"
                " OpenEnv's protocol a session ends with its connection; use the server's grpc://"
                " address, or resume=True"
            )
        if self.is_legacy and self.sessions:
            raise self._make_capacity_error(1)
        return await retry_on_new_connection(lambda: self._open_once(args), _may_open_elsewhere)

    async def _open_once(self, args: OpenArgs) -> tuple[OpenEnvSession, StepResult | None]:
        session = OpenEnvSession(self, await self._open_channel(args.with_text), args)
        self.sessions.add(session)
        try:
            if args.reset is not None:
                return session, await session.reset(args.reset)
            if not self.is_legacy:
                await session.state()  # a full server refuses only the first call
        except BaseException:
            session.abandon()
            raise
        return session, None

    async def open_group(
        self, args: OpenArgs, size: int
    ) -> list[tuple[OpenEnvSession, StepResult | None]]:
        """Open `size` sessions with one seed and equal first results. If one fails, open none."""
        if self.is_legacy:
            if size != 1:
                raise self._make_capacity_error(size)
            return [await self.open(args)]
        args = replace(args, reset=DefaultSeeds().fill(args.reset or ResetArgs()))
        open_tasks = [asyncio.ensure_future(self.open(args)) for _ in range(size)]
        try:
            group = await asyncio.gather(*open_tasks)
            _check_group([result for _, result in group if result is not None], args)
        except BaseException:
            for open_task in open_tasks:
                open_task.cancel()
            for open_outcome in await asyncio.gather(*open_tasks, return_exceptions=True):
                if not isinstance(open_outcome, BaseException):
                    open_outcome[0].abandon()
            raise
        return group

    async def close(self) -> None:
        """Close all sessions."""
        for session in list(self.sessions):
            session.abandon()
        while self._close_tasks:
            await asyncio.gather(*self._close_tasks)

    def make_fields_renderer(self) -> FieldsText | None:
        """Return a renderer for upstream servers, unless the server's actions are tools."""
        action_schema = self._schema.get("action") or {}
        action_fields = action_schema.get("properties", {}).keys() - {"metadata"}
        if self.has_extensions or not action_fields or "tool_name" in action_fields:
            return None
        return FieldsText(self._metadata.get("name") or "", action_schema)

    def remove_session(self, session: OpenEnvSession) -> None:
        """Close a session's channel in the background."""
        if session in self.sessions:
            self.sessions.remove(session)
            task = asyncio.get_running_loop().create_task(session.channel.close())
            self._close_tasks.add(task)
            task.add_done_callback(self._close_tasks.discard)

    async def _open_channel(self, with_text: bool) -> HttpChannel | SocketChannel:
        if self.is_legacy:
            return HttpChannel(self._client)
        query = ""
        if self.has_extensions:
            query = "?ludus=1" if with_text else "?ludus=1&text=0"
        return await retry_unavailable(
            lambda: SocketChannel.open(self.server, query), self.server.options.reconnect_timeout_s
        )

    def _make_capacity_error(self, num_sessions: int) -> CapacityError:
        return CapacityError(
            f"{self.server.address}, an OpenEnv 0.1 server, supports only 1 session, but"
            f" {num_sessions + len(self.sessions)} are needed; close the other session first,"
            " start more servers, or rebuild the environment with OpenEnv 0.2 or later"
        )


class OpenEnvSession:
    """One session on its own channel. `WireSession` documents its methods."""

    def __init__(
        self, transport: OpenEnvTransport, channel: HttpChannel | SocketChannel, args: OpenArgs
    ) -> None:
        self.session_id = uuid.uuid4().hex
        self.tools_session_id = ""
        self.channel = channel
        self._transport = transport
        self._close_when_done = args.close_when_done
        self._with_text = args.with_text
        self._fields_renderer = transport.make_fields_renderer() if args.with_text else None
        self._observation: JsonObject = {}
        """The last observation, for reading a text action on the client."""

    async def reset(self, args: ResetArgs) -> StepResult:
        if self._transport.is_legacy:
            _refuse_ignored_arguments(self._transport.server, args)
        reset_options = dict(args.options)
        if args.seed is not None:
            reset_options["seed"] = args.seed
        if args.episode_id:
            reset_options["episode_id"] = args.episode_id
        encoded_options = orjson.Fragment(encode_json(reset_options, "reset options"))
        reply = await self._call({"type": "reset", "data": encoded_options})
        self.tools_session_id = reply.get("tools_session_id", self.tools_session_id)
        return self._read_result(reply, 0)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        with self._convert_refusals(action):
            reply = await self._call(self._make_step_message(action, step_index))
        result = self._read_result(reply, step_index)
        if self._close_when_done and result.done:
            self.abandon()
        return result

    async def state(self) -> JsonObject:
        return await self._call({"type": "state"})

    async def call_tool(self, name: str, arguments: JsonObject) -> ToolResult:
        if self._transport.is_legacy:
            raise ToolError(
                f"cannot call tool '{name}': an OpenEnv 0.1 server has no tools; rebuild the"
                " environment with OpenEnv 0.2 or later"
            )
        encoded_arguments = orjson.Fragment(encode_json(arguments, "arguments"))
        action = {"type": "call_tool", "tool_name": name, "arguments": encoded_arguments}
        reply = await self._call({"type": "step", "data": action})
        result = _read_tool_result(name, reply)
        if self._close_when_done and result.done:
            self.abandon()
        return result

    async def close(self) -> None:
        self.abandon()
        await self.channel.close()

    def abandon(self) -> None:
        self._transport.remove_session(self)

    async def _call(self, message: JsonObject) -> JsonObject:
        server = self._transport.server
        if self not in self._transport.sessions:
            raise SessionLostError("the session was closed; open a new session")
        try:
            async with asyncio.timeout(server.options.timeout_s):
                return await self.channel.call(message)
        except TimeoutError:
            raise CallTimeoutError(
                f"{server.address} did not respond within {server.options.timeout_s:g} s; the"
                " session is closed"
            ) from None

    def _make_step_message(self, action: bytes | str, step_index: int) -> JsonObject:
        message: JsonObject = {"type": "step"}
        if isinstance(action, bytes):
            message["data"] = orjson.Fragment(action)
        elif self._fields_renderer is not None:
            message["data"] = self._fields_renderer.parse(action, self._observation)
        elif self._transport.has_extensions:
            message["text"] = action
        else:
            raise InvalidCallError(
                f"{self._transport.server.address}, an upstream OpenEnv server, does not accept"
                " text; send a JSON action"
            )
        if self._transport.has_extensions:
            message["step_index"] = step_index
        return message

    def _read_result(self, payload: JsonObject, step_index: int) -> StepResult:
        """Convert a payload. Upstream servers send no separate flags and no step numbers."""
        reward = payload.get("reward")
        is_done = bool(payload.get("done"))
        if self._transport.has_extensions:
            info, success = payload.get("info", {}), payload.get("success")
        else:
            info = read_upstream_metadata(payload)
            success = read_success(info, is_done=is_done)
        return StepResult(
            observation=payload.get("observation") or {},
            reward=None if reward is None else float(reward),
            terminated=payload.get("terminated", is_done),
            truncated=payload.get("truncated", False),
            info=info,
            step_index=payload.get("step_index", step_index),
            text=self._render_text(payload, is_first=step_index == 0),
            tensors=read_tensors_json(payload.get("tensors", [])),
            success=success,
        )

    @contextlib.contextmanager
    def _convert_refusals(self, action: bytes | str) -> Iterator[None]:
        """Convert an upstream server's refusal of an action from text to an ActionParseError."""
        try:
            yield
        except InvalidCallError as error:
            if isinstance(action, bytes) or self._fields_renderer is None:
                raise
            raise ActionParseError(f"{error.message}, from the text {action[-200:]!r}") from None

    def _render_text(self, payload: JsonObject, *, is_first: bool) -> TextView | None:
        if self._fields_renderer is not None:
            observation = self._observation = payload["observation"]
            content = self._fields_renderer.render(observation, first=is_first)
            legal_answers = self._fields_renderer.legal_answers(observation)
            return TextView([{"role": "user", "content": content}], legal_answers)
        text_json = payload.get("text") if self._with_text else None
        return TextView(text_json["messages"], text_json["legal_answers"]) if text_json else None


def _read_tool_result(name: str, payload: JsonObject) -> ToolResult:
    """Read the payload of a tool call. Upstream servers send no separate flags.

    Raises:
        ToolError: the tool failed.
    """
    observation, reward = payload.get("observation") or {}, payload.get("reward")
    if error := observation.get("error"):
        raise ToolError(f"tool '{name}' failed: {error.get('message') or error}")
    result, is_done = observation.get("result"), bool(payload.get("done"))
    content = result.get("structured_content") if isinstance(result, dict) else None
    return ToolResult(
        content if isinstance(content, dict) else {"result": result},
        None if reward is None else float(reward),
        payload.get("terminated", is_done),
        payload.get("truncated", False),
        read_success(read_upstream_metadata(payload), is_done=is_done),
    )


def _may_open_elsewhere(error: EnvError) -> bool:
    """Return True if the server of the connection opens no session, but another server may."""
    return is_draining_error(error) or isinstance(error, ConnectionLostError)


def _refuse_ignored_arguments(server: RemoteServer, args: ResetArgs) -> None:
    """Refuse the seed and the options of a reset, which an OpenEnv 0.1 server would ignore."""
    if args.options:
        raise ConfigError(
            f"{server.address} would ignore the reset options {', '.join(sorted(args.options))},"
            " because it is an OpenEnv 0.1 server; set the options when the server is started"
        )
    if args.seed is not None and not server.options.allow_ignored_seed:
        raise ConfigError(
            f"{server.address} would ignore the seed {args.seed}, because it is an OpenEnv 0.1"
            " server: episodes cannot be repeated, and the sessions of a group start"
            " differently; remove the seed, or connect with allow_ignored_seed=True"
        )


def _check_group(first_results: list[StepResult], args: OpenArgs) -> None:
    """Check that the sessions of a group start with the same observation.

    Raises:
        GroupMismatchError: their first results differ.
    """
    first_views = [(result.observation, result.text) for result in first_results]
    if any(first_view != first_views[0] for first_view in first_views[1:]):
        seed = args.reset.seed if args.reset else None
        raise GroupMismatchError(
            f"{len(first_views)} sessions with seed {seed} returned different first observations;"
            " the environment's reset must depend on its seed alone; see: ludus env check"
        )
