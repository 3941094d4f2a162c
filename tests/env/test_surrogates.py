"""Texts of an environment with lone surrogates reach the client on every wire."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import websockets
from pydantic import BaseModel, ConfigDict, Field

from ludus.env import Action, Environment, Message, Observation, State, Tool, Transition
from ludus.env.client import AsyncEnvClient
from ludus.env.text import FieldsText
from ludus.env.text.unicode import load_json, replace_surrogates
from ludus.proto.errors import ActionParseError, EnvError, IllegalActionError, ToolError
from tests.env.served import WIRES, serve, server_address

REPLACED_TEXTS = {
    "\ud800": "�",
    "\udfff tail": "� tail",
    "a\udc80b\ud83dc": "a�b�c",
    "\udc00\ud83d": "��",
    "\udbff" + "\udfff": "\U0010ffff",
    "é \ud800 \0 😀": "é � \0 😀",
}


class TextAction(Action):
    """The number of a text, because clients send no surrogates themselves."""

    index: int
    note: str = ""


class Part(BaseModel):
    """A nested model."""

    text: str


class TextObservation(Observation):
    """Texts at several depths."""

    text: str = ""
    parts: list[Part] = Field(default_factory=list)
    words: dict[str, Any] = Field(default_factory=dict)


class TextState(State):
    """A state with other fields."""

    model_config = ConfigDict(extra="allow")


class TextRenderer:
    """Renderer that shows the text."""

    def render(self, observation: TextObservation, *, first: bool) -> list[Message]:
        return [{"role": "user", "content": observation.text}]

    def parse(self, text: str, observation: TextObservation) -> TextAction:
        return TextAction(index=int(text))

    def legal_answers(self, observation: TextObservation) -> list[str]:
        return [observation.text, "0"]


class SurrogateEnv(Environment[TextAction, TextObservation, TextState]):
    """An environment that says a text with surrogates everywhere."""

    action_type = TextAction
    observation_type = TextObservation
    state_type = TextState
    name = "surrogates"
    description = "An odd text: \ud800"
    steps_on_event_loop = True
    text_renderer = TextRenderer()

    def __init__(self) -> None:
        self._text = ""

    def reset(self, *, seed: int | None = None) -> Transition[TextObservation]:
        self._text = list(REPLACED_TEXTS)[seed or 0]
        return Transition(TextObservation())

    def step(self, action: TextAction) -> Transition[TextObservation]:
        text = self._text
        if action.index:
            raise IllegalActionError(text)
        observation = TextObservation(
            text=text,
            parts=[Part(text=text)],
            words={text: [text, (text,), {"deep": text}]},
            metadata={"text": text},
        )
        return Transition(
            observation, 1.0, terminated=True, info={text: text}, tensors={text: np.zeros(1)}
        )

    @property
    def state(self) -> TextState:
        return TextState(text=self._text, parts=[Part(text=self._text)])

    @property
    def tools(self) -> list[Tool]:
        return [Tool("say", "Say the text: \udfff")]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments:
            raise ToolError(self._text)
        return {"text": [self._text], self._text: 1}


async def play_and_compare(session: Any, text: str) -> None:
    for call in (session.step({"index": 1}), session.call_tool("say", {"x": 1})):
        with pytest.raises(EnvError):
            await call
    assert (await session.call_tool("say", {})).content == {"text": [text], text: 1}
    state = await session.state()
    assert (state["text"], state["parts"]) == (text, [{"text": text}])
    result = await session.step({"index": 0})
    assert result.observation["text"] == text
    assert result.observation["parts"] == [{"text": text}]
    assert result.observation["words"] == {text: [text, [text], {"deep": text}]}
    assert (result.info, list(result.tensors)) == ({text: text}, [text])
    assert result.text is not None
    assert result.text.messages == [{"role": "user", "content": text}]
    assert result.text.legal_answers == [text, "0"]


@pytest.mark.parametrize("wire", WIRES)
async def test_client_receives_every_text_with_replaced_surrogates(
    wire: str, tmp_path: Path
) -> None:
    recording = tmp_path / "episodes.jsonl"
    async with serve(SurrogateEnv, record=recording) as server:
        client = await AsyncEnvClient.connect(server_address(server, wire))
        assert (await client.describe()).description == "An odd text: �"
        for seed, text in enumerate(REPLACED_TEXTS.values()):
            session, _ = await client.open(seed=seed)
            await play_and_compare(session, text)
            await session.close()
        await client.close()
    episodes = [orjson.loads(line) for line in recording.read_bytes().splitlines()]
    assert sum(len(episode.get("steps", [])) >= 1 for episode in episodes) == len(REPLACED_TEXTS)


async def test_http_and_mcp_replace_surrogates() -> None:
    async with (
        serve(SurrogateEnv) as server,
        httpx.AsyncClient(base_url=server.http_address, timeout=60) as client,
    ):
        reset = await client.post("/reset", json={"seed": 0})
        headers = {"x-session-id": reset.headers["x-session-id"]}
        tool_call = {"type": "call_tool", "tool_name": "say", "arguments": {}}
        observations = [
            (await client.post("/step", json={"action": action}, headers=headers)).json()
            for action in (tool_call, {"index": 0})
        ]
        assert observations[0]["observation"]["result"]["data"] == {"text": ["�"], "�": 1}
        assert observations[1]["observation"]["text"] == "�"
        assert (await client.get("/state", headers=headers)).json()["text"] == "�"
        assert (await client.get("/metadata")).json()["description"] == "An odd text: �"
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        tools = (await client.post("/mcp", json=body)).json()["result"]["tools"]
        assert "Say the text: �" in [tool["description"] for tool in tools]


class Color(StrEnum):
    """Texts that stay members."""

    RED = "red"


@dataclass(frozen=True)
class Point:
    """A frozen data class."""

    name: str
    tags: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "replaced_value"),
    [
        ({"\ud800": ("\ud801", {"\udc00"})}, {"�": ("�", {"�"})}),
        (Point("\ud800", ["\ud801"]), Point("�", ["�"])),
        ([Color.RED, 1, None, b"\xff", 1.5], [Color.RED, 1, None, b"\xff", 1.5]),
        (frozenset({"\udfff"}), frozenset({"�"})),
        (Part(text="\udbff\udfff"), Part(text="\U0010ffff")),
        (str, str),
    ],
)
def test_surrogates_are_replaced_at_every_depth(value: object, replaced_value: object) -> None:
    assert replace_surrogates(value) == replaced_value


@pytest.mark.parametrize(
    ("encoded_json", "value"),
    [
        (b'"\\ud800"', "�"),
        (b'{"\\uDFFF": ["\\ud83d\\ude00", "\\ud83d"]}', {"�": ["😀", "�"]}),
        ('"\\uDBFF"', "�"),
        (b"[1]", [1]),
        (b'"\\\\ud800"', "\\ud800"),
    ],
)
def test_json_of_other_programs_is_read(encoded_json: bytes | str, value: object) -> None:
    assert load_json(encoded_json) == value


@pytest.mark.parametrize("encoded_json", [b"\\ud800", b'"\\ud800', b"\xff", b"", b'["\\udfff"'])
def test_malformed_json_is_refused(encoded_json: bytes) -> None:
    with pytest.raises(ValueError):
        load_json(encoded_json)


@pytest.mark.parametrize("text", ['{"message": "\\ud800"}', '"\\udfff"', '{"\\ud800": 1}'])
def test_text_action_with_escaped_surrogates_can_be_sent(text: str) -> None:
    schema = {"properties": {"message": {"type": "object"}}, "required": ["message"]}
    action = FieldsText("test", schema).parse(text, {})
    assert orjson.dumps(action)
    with pytest.raises(ActionParseError):
        FieldsText("test", schema).parse("\ud800", {})


@pytest.mark.parametrize("text", ["\ud800", "\udc00\ud800", "a\udfff", "\ud83d\ude00\udbff"])
async def test_surrogates_in_the_text_of_a_client_are_replaced(text: str) -> None:
    headers = {"content-type": "application/json"}
    action = {"index": 0, "note": text}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    async with serve(SurrogateEnv) as server, httpx.AsyncClient(headers=headers) as client:
        reset = await client.post(f"{server.http_address}/reset", content=json.dumps({"a": text}))
        client.headers["x-session-id"] = session_id = reset.headers["x-session-id"]
        call["params"] = {"name": "say", "arguments": {text: text}, "session_id": session_id}
        reply = await client.post(f"{server.http_address}/mcp", content=json.dumps(call))
        assert reply.json()["result"]["isError"]
        body = json.dumps({"action": action})
        reply = await client.post(f"{server.http_address}/step", content=body)
        assert (reply.status_code, reply.json()["reward"]) == (200, 1.0)
        async with websockets.connect(f"ws{server.http_address[4:]}/ws") as connection:
            for kind, data in (("reset", {}), ("step", action)):
                await connection.send(json.dumps({"type": kind, "data": data}))
                frame = json.loads(await connection.recv())
                assert frame["type"] == "observation"


@pytest.mark.parametrize("tail", ['"', "[" * 100_000, "9" * 5000, "NaN x"])
def test_other_faults_of_json_with_surrogates_are_reported(tail: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        load_json('["\\ud800", ' + tail)
