"""Options of a server that cannot work, and what workers are told."""

from pathlib import Path

import pytest

from ludus.env.serving.options import ServerOptions, available_cpus
from ludus.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"isolation": "jail"}, "one of inline, pool, process; got 'jail'"),
        ({"num_workers": 2}, "num_workers with isolation='pool' only"),
        ({"isolation": "process", "num_workers": 2}, "num_workers with isolation='pool' only"),
        ({"isolation": "pool", "num_workers": 0}, "num_workers >= 1, got 0"),
        ({"memory_limit_mb": 100}, "memory_limit_mb with worker processes only"),
        ({"isolation": "pool", "cpu_limit_s": 5}, "cpu_limit_s with isolation='process' only"),
        ({"step_timeout_s": -1}, "step_timeout_s >= 0, got -1"),
        ({"tls_cert": Path("c.pem")}, "tls_cert and tls_key together, got tls_cert alone"),
        ({"tls_key": Path("k.pem")}, "got tls_key alone; give tls_cert too"),
        ({"tls_client_ca": Path("ca.pem")}, "tls_client_ca with tls_cert and tls_key"),
        ({"admin_port": 70_000}, "admin_port between 0 and 65535, got 70000"),
        ({"drain_grace_s": -1}, "drain_grace_s >= 0, got -1"),
        ({"session_key": "short"}, "at least 16 bytes, got 5"),
    ],
)
def test_options_that_cannot_work_together_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ServerOptions(**options)


def test_workers_have_a_time_limit_unless_it_is_turned_off():
    assert ServerOptions().bound_step_timeout_s == 0
    assert ServerOptions(isolation="pool").worker_options.step_timeout_s == 60
    assert ServerOptions(isolation="pool", step_timeout_s=0).worker_options.step_timeout_s == 0


def test_a_pool_has_a_worker_for_each_cpu_but_no_more_than_sessions():
    assert ServerOptions(isolation="pool").worker_options.num_workers == available_cpus()
    few = ServerOptions(isolation="pool", num_workers=8, max_sessions=3)
    assert few.worker_options.num_workers == 3


def test_secrets_show_in_no_representation():
    options = ServerOptions(token="a-token", session_key="a-key-of-at-least-16-bytes")
    assert "a-token" not in repr(options)
    assert "a-key" not in repr(options)


def test_a_server_is_named_after_its_pod(monkeypatch):
    assert ServerOptions().server_id != ServerOptions().server_id
    monkeypatch.setenv("POD_UID", "8C5F7A3E-0b1d")
    assert ServerOptions().server_id == "8c5f7a3e0b1d"
