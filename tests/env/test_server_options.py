"""Validation, defaults and flags of server options."""

import socket
from pathlib import Path

import pytest
from starlette.applications import Starlette

from ludus.env.serving.listeners import HttpListener, bind
from ludus.env.sessions.options import ServerOptions, count_available_cpus, list_flags
from ludus.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isolation": "jail"}, "isolation: expected 'inline', 'pool' or 'process', got 'jail'"),
        ({"require_sandbox": True}, "require_sandbox needs isolation='pool' or 'process'"),
        ({"accept_missing": ["seccomp"]}, "accept_missing needs isolation='pool' or 'process'"),
        ({"isolation": "pool", "accept_missing": ["firewall"]}, "accept_missing.0: expected"),
        ({"isolation": "pool", "max_processes": -1}, "max_processes: expected"),
        ({"no_network": True}, "no_network needs isolation='pool' or 'process'"),
        ({"num_workers": 2}, "num_workers needs isolation='pool'"),
        ({"isolation": "process", "num_workers": 2}, "num_workers needs isolation='pool'"),
        (
            {"isolation": "pool", "num_workers": 0},
            "num_workers: expected at least 1, got 0",
        ),
        ({"memory_limit_mb": 100}, "memory_limit_mb needs isolation='pool' or 'process'"),
        ({"isolation": "pool", "cpu_limit_s": 5}, "cpu_limit_s needs isolation='process'"),
        ({"step_timeout_s": -1}, "step_timeout_s: expected at least 0, got -1"),
        ({"tls_cert": Path("c.pem")}, "tls_cert needs tls_key"),
        ({"tls_key": Path("k.pem")}, "tls_key needs tls_cert"),
        ({"tls_client_ca": Path("ca.pem")}, "tls_client_ca needs tls_cert and tls_key"),
        ({"admin_port": 70_000}, "admin_port: expected at most 65535, got 70000"),
        ({"drain_grace_s": -1}, "drain_grace_s: expected at least 0, got -1"),
        ({"session_key": "short"}, "at least 16 bytes, got 5"),
        ({"idle_timeout_s": float("nan")}, "idle_timeout_s: expected a finite number, got nan"),
        ({"num_wrokers": 2}, "num_wrokers: extra inputs are not permitted, got 2"),
    ],
)
def test_invalid_or_conflicting_options_raise_a_config_error(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**options)


def test_steps_have_a_time_limit_by_default() -> None:
    assert ServerOptions().step_timeout_s == 60
    assert ServerOptions(isolation="pool").step_timeout_s == 60


def test_pool_has_one_worker_per_cpu_but_at_most_one_per_session() -> None:
    assert ServerOptions(isolation="pool").num_pool_workers == count_available_cpus()
    options = ServerOptions(isolation="pool", num_workers=8, max_sessions=3)
    assert options.num_pool_workers == 3


def test_secrets_are_not_in_repr() -> None:
    options = ServerOptions(token="a-token", session_key="a-key-of-at-least-16-bytes")
    assert "a-token" not in repr(options)
    assert "a-key" not in repr(options)


def test_server_id_is_the_pod_uid_or_random(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerOptions().server_id != ServerOptions().server_id
    monkeypatch.setenv("POD_UID", "8C5F7A3E-0b1d")
    assert ServerOptions().server_id == "8c5f7a3e0b1d"


def test_token_is_read_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-token")
    assert ServerOptions(token_env="MY_TOKEN").token == "a-token"
    assert ServerOptions(token_env="NOT_SET", token="given").token == "given"


def test_every_flag_has_help_text_and_no_secret_has_a_flag() -> None:
    flags_by_field = {flag.field_name: flag for flag in list_flags()}
    assert all(flag.help.endswith(".") for flag in flags_by_field.values())
    assert set(ServerOptions.model_fields) - set(flags_by_field) == {
        "token",
        "session_key",
        "server_key",
        "server_id",
    }


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine lacks IPv6")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_ipv6_wildcard_address_includes_ipv4(family) -> None:
    with bind("::", 0, "port") as listener, socket.socket(family) as client:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        client.connect((host, listener.getsockname()[1]))
        assert listener.accept()[1]


def test_http_responses_are_sent_without_delay() -> None:
    with bind("127.0.0.1", 0, "port") as listening_socket:
        HttpListener(Starlette(), listening_socket)
        with socket.create_connection(listening_socket.getsockname()):
            connection, _ = listening_socket.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
