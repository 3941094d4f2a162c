"""OpenEnv's clients of every generation on our echo environment: equal texts and rewards."""

import json

import pytest

from tests.conformance.parties import CLIENTS, our_package, run_upstream, upstream_python

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]

HELLO = {
    "ready": "Echo environment ready!",
    "echoed": "Hello, World!",
    "length": 13,
    "reward": 1.3,
    "done": False,
}
TOOLS = {
    "names": ["echo_message", "echo_with_length"],
    "echo_message": "hi",
    "echo_with_length": {"message": "hi", "length": 2},
}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with our_package(tmp_path_factory.mktemp("echo"), "echo_env", {}) as running:
        yield running.http_address


@pytest.mark.parametrize("version", CLIENTS)
def test_hello_world_pays_1_3_through_every_generation_of_clients(version, address):
    requirement, player = CLIENTS[version]
    program = player.replace("player", "echo")
    seen = json.loads(run_upstream(upstream_python(requirement), program, address))
    tools = seen.pop("tools", None)
    assert seen == HELLO
    assert tools in (None, TOOLS)
    assert version != "0.10.0" or tools == TOOLS, "the newest knows of tools"
