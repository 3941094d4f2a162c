"""OpenEnv clients of every version get equal texts and rewards from our echo environment."""

import json

import pytest

from tests.conformance.parties import CLIENTS, install_upstream_python, run_upstream, serve_package

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]

HELLO_RESULT = {
    "ready": "Echo environment ready!",
    "echoed": "Hello, World!",
    "length": 13,
    "reward": 1.3,
    "done": False,
}
TOOL_RESULT = {
    "names": ["echo_message", "echo_with_length"],
    "echo_message": "hi",
    "echo_with_length": {"message": "hi", "length": 2},
}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with serve_package(tmp_path_factory.mktemp("echo"), "echo_env", {}) as echo_server:
        yield echo_server.http_address


@pytest.mark.parametrize("version", CLIENTS)
def test_every_client_version_gets_the_same_echo_result(version, address):
    requirement, program_name = CLIENTS[version]
    program = program_name.replace("player", "echo")
    output = json.loads(run_upstream(install_upstream_python(requirement), program, address))
    tools = output.pop("tools", None)
    assert output == HELLO_RESULT
    assert tools in (None, TOOL_RESULT)
    assert version != "0.10.0" or tools == TOOL_RESULT, "the newest client reported no tools"
