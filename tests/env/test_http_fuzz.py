"""Any request to the HTTP routes gets a typed response, never a bare 500."""

import asyncio

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from starlette.testclient import TestClient

from ludus.env.http.app import build_app
from tests.env.counting_env import CountingEnv
from tests.env.served_app import make_core
from tests.env.tool_env import ToolEnv

pytestmark = pytest.mark.slow


class PatientEnv(CountingEnv):
    """A counting environment that never raises and never sleeps."""

    def step(self, action):
        return super().step(action.model_copy(update={"add": action.add % 7 + 1}))


app = build_app(make_core(PatientEnv, max_sessions=4))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_requests_from_the_schema_cause_no_server_error(case) -> None:
    response = case.call()
    case.validate_response(response, checks=[not_a_server_error])
    if response.status_code >= 400 and response.status_code not in (404, 405):
        assert "detail" in response.json() or "error" in response.json()


PATHS = ("/reset", "/step", "/state", "/mcp", "/close", "/drain", "/metadata", "/metrics")
bodies = st.binary(max_size=200) | st.sampled_from(
    [
        b"",
        b"{}",
        b"null",
        b"[" * 3000,
        b'{"action":' * 300 + b"1" + b"}" * 300,
        b'{"add":' + b"9" * 4000 + b"}",
        b'{"seed":-1}',
        b'{"seed":1e400}',
        b'{"seed":18446744073709551616}',
        b'{"add":"\\ud800"}',
        b'{"action":{"add":1},"timeout_s":-1}',
        b'{"action":{"add":1},"timeout_s":1e-9}',
        b'{"action":{"type":"call_tool","tool_name":{},"arguments":[]}}',
        b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":{}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"note","arguments":[1]}}',
    ]
)
headers = st.dictionaries(
    st.sampled_from(["x-session-id", "mcp-session-id", "cookie", "accept", "content-type"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
    | st.sampled_from(["application/json", "text/plain", "ludus_session=nope", "a.b", "."]),
    max_size=3,
)


@pytest.fixture(scope="module")
def client():
    core = make_core(ToolEnv, max_sessions=3)
    app = build_app(core)
    with pytest.MonkeyPatch.context() as monkeypatch, TestClient(app) as client:
        monkeypatch.setattr(core, "drain", lambda: None)  # /drain is one of the paths
        yield client, core


@given(
    path=st.sampled_from(PATHS),
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD"]),
    body=bodies,
    random_headers=headers,
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_random_requests_cause_no_internal_error(
    client, path: str, method: str, body, random_headers
) -> None:
    http_client, core = client
    random_headers = {"content-type": "application/json", **random_headers}
    response = http_client.request(method, path, content=body, headers=random_headers)
    assert response.status_code not in (500, 502), response.text
    assert core.load.num_sessions <= 3
    http_client.cookies.clear()


def test_unused_sessions_make_room_for_new_sessions(client) -> None:
    http_client, core = client
    for session_id in list(core.open_sessions):
        asyncio.run(core.close(session_id))
    for _ in range(10):
        assert http_client.post("/reset").status_code == 200
        http_client.cookies.clear()
    assert core.load.num_sessions <= 3
