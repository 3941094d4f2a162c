"""OpenEnv's WebSocket `/ws`: one connection is one session, one reply per message.

A frame is sent only as the reply to a message, because stock clients take any frame for
their reply; the one exception is the refusal of a connection, which OpenEnv sends first.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ValidationError

from ludus.env.encoding import EncodedResult
from ludus.env.openenv_messages import (
    CloseMessage,
    LudusStepMessage,
    McpMessage,
    ResetMessage,
    StateMessage,
    StepMessage,
    error_data,
    frame,
    ludus_payload,
    observation_payload,
    reset_args,
    validation_error_data,
)
from ludus.env.sessions import OpenArgs, Sessions
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError, SessionLostError

_MESSAGE_TYPES: dict[str, type[BaseModel]] = {
    "reset": ResetMessage,
    "step": StepMessage,
    "state": StateMessage,
    "close": CloseMessage,
    "mcp": McpMessage,
}
_LUDUS_MESSAGE_TYPES = _MESSAGE_TYPES | {"step": LudusStepMessage}


async def serve_websocket(websocket: WebSocket, sessions: Sessions) -> None:
    """Returns when the connection has ended and its session is freed."""
    await websocket.accept()
    stock = websocket.query_params.get("ludus") != "1"
    try:
        try:
            opened = await sessions.open(OpenArgs(with_text=not stock))
        except EnvError as error:
            await websocket.send_text(frame("error", error_data(error, sessions, stock=stock)))
            await websocket.close()
            return
        connection = _Connection(websocket, sessions, opened.session_id, stock)
        try:
            await connection.serve()
        finally:
            await sessions.close(opened.session_id)
        await websocket.close()
    except WebSocketDisconnect:
        return


class _Connection:
    """The conversation on one socket."""

    def __init__(
        self, websocket: WebSocket, sessions: Sessions, session_id: str, stock: bool
    ) -> None:
        self._websocket = websocket
        self._sessions = sessions
        self._session_id = session_id
        self._stock = stock
        self._message_types = _MESSAGE_TYPES if stock else _LUDUS_MESSAGE_TYPES

    async def serve(self) -> None:
        """Returns when the client or the session is done."""
        while True:
            try:
                reply = await self._reply_to(await self._receive())
            except SessionLostError as error:
                await self._send("error", self._error_data(error))
                return
            except EnvError as error:
                reply = ("error", self._error_data(error))
            except ValidationError as error:
                reply = ("error", validation_error_data(error))
            if reply is None:
                return
            await self._send(*reply)

    async def _receive(self) -> JsonObject:
        """The next message.

        Raises:
            SessionLostError: the frame is nothing this protocol knows; it ends the session.
        """
        received = await self._websocket.receive()
        if received["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(received["code"])
        text = received.get("text")
        if text is None:
            raise SessionLostError(
                "expected a text frame, got a binary one", ErrorCode.SESSION_ERROR
            )
        try:
            message = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise InvalidCallError(f"Invalid JSON: {error}", ErrorCode.INVALID_JSON) from None
        if not isinstance(message, dict):
            raise SessionLostError(
                f"expected a JSON object, got {type(message).__name__}", ErrorCode.SESSION_ERROR
            )
        return message

    async def _reply_to(self, raw: JsonObject) -> tuple[str, Any] | None:
        """Kind and data of the reply; None ends the conversation."""
        kind = raw.get("type", "")
        message_type = self._message_types.get(kind) if isinstance(kind, str) else None
        if message_type is None:
            raise InvalidCallError(f"Unknown message type: {kind}", ErrorCode.UNKNOWN_TYPE)
        message = message_type.model_validate(raw)
        match message:
            case StepMessage() | LudusStepMessage():
                return "observation", self._payload(await self._step(message))
            case ResetMessage():
                args = reset_args(message.data, self._sessions.description, lenient=self._stock)
                result = await self._sessions.reset(self._session_id, args)
                return "observation", self._payload(result)
            case StateMessage():
                return "state", orjson.Fragment(await self._sessions.state(self._session_id))
            case McpMessage():
                return "mcp", _no_mcp(message.data)
        return None

    async def _step(self, message: StepMessage | LudusStepMessage) -> EncodedResult:
        step_index = 0
        action: bytes | str | None = None
        if isinstance(message, LudusStepMessage):
            step_index = message.step_index
            action = message.text
            if (message.text is None) == (message.data is None):
                raise InvalidCallError("expected data or text in a step, got both or neither")
        if action is None:
            action = orjson.dumps(message.data)
        return await self._sessions.step(self._session_id, action, step_index)

    def _payload(self, result: EncodedResult) -> JsonObject:
        return observation_payload(result) if self._stock else ludus_payload(result)

    def _error_data(self, error: EnvError) -> JsonObject:
        return error_data(error, self._sessions, stock=self._stock)

    async def _send(self, kind: str, data: Any) -> None:
        await self._websocket.send_text(frame(kind, data))


def _no_mcp(request: JsonObject) -> JsonObject:
    message = "Environment does not support MCP"
    error = {"code": -32603, "message": message, "data": None}
    return {"jsonrpc": "2.0", "id": request.get("id"), "error": error}
