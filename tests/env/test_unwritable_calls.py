"""Calls that cannot be encoded, which fail with the same message on all wires."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.errors import InvalidCallError
from tests.env.counting_env import CountAction
from tests.env.legacy_server import legacy_server
from tests.env.served import WIRES, serve, server_address
from tests.env.tool_env import ToolEnv

LARGE_INTEGER = 2**70
SURROGATE = "\ud800"
"""Half of a surrogate pair, which UTF-8 cannot encode."""


async def collect_error_messages(address: str) -> list[str]:
    """Make calls that cannot be encoded; return their error messages."""
    async with await AsyncEnvClient.connect(address) as client:
        session, _ = await client.open(seed=1)
        calls = {
            "a number": lambda: session.step({"add": LARGE_INTEGER}),
            "a set": lambda: session.step({"add": {1}}),
            "an unpaired surrogate": lambda: session.step(
                CountAction(add=1, metadata={"note": SURROGATE})
            ),
            "a text": lambda: session.step(text=SURROGATE),
            "an option": lambda: session.reset(options={"start": LARGE_INTEGER}),
            "an option's key": lambda: session.reset(options={1: 2}),
            "an option of a new session": lambda: client.open(options={"start": LARGE_INTEGER}),
            "an option of a group": lambda: client.open_group(2, options={"start": LARGE_INTEGER}),
            "an argument": lambda: session.call_tool("note", {"text": LARGE_INTEGER}),
            "a seed": lambda: session.reset(seed=1.5),
        }
        messages = []
        for name, call in calls.items():
            with pytest.raises(InvalidCallError) as exc_info:
                await call()
            messages.append(f"{name}: {exc_info.value.message}")
        with pytest.raises(InvalidCallError, match="a call must be plain JSON"):
            await session.call_tool(SURROGATE, {})
        assert (await session.step({"add": 2})).step_index == 1
        return messages


async def test_unencodable_calls_fail_with_the_same_message_on_all_wires() -> None:
    async with serve(ToolEnv) as server:
        grpc_messages, http_messages = [
            await collect_error_messages(server_address(server, wire)) for wire in WIRES
        ]
    assert grpc_messages == http_messages
    assert "an action must be plain JSON" in grpc_messages[0]
    assert "Integer exceeds 64-bit range" in grpc_messages[0]


@pytest.mark.parametrize("wire", WIRES)
async def test_numpy_numbers_are_sent_as_numbers(wire: str) -> None:
    async with (
        serve(ToolEnv) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        session, first_result = await client.open(seed=np.int64(3), options={"start": np.int64(4)})
        assert first_result.observation["total"] == 4
        assert (await session.step({"add": np.int64(2)})).observation["total"] == 6


@pytest.mark.slow
async def test_unencodable_action_is_not_sent_to_an_openenv_0_1_server() -> None:
    with legacy_server() as (address, counter):
        async with await AsyncEnvClient.connect(address) as client:
            session, _ = await client.open()
            with pytest.raises(InvalidCallError, match="integers of at most 64 bits"):
                await session.step({"add": LARGE_INTEGER})
            assert len(counter.bodies) == 1
