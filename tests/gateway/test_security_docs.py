"""Consistency of docs/security.md with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ludus.env.asgi.uvicorn_protocols import HEAD_TIMEOUT_S, MAX_FRAGMENTS, MAX_HEAD_BYTES
from ludus.env.incoming.json_values import MAX_JSON_VALUES
from ludus.env.limits import (
    BODY_TIMEOUT_S,
    MAX_BYTES_AHEAD,
    MAX_CALL_FIELDS,
    MAX_CALLS_AHEAD,
    MAX_CALLS_PER_MESSAGE,
    MAX_MESSAGE_BYTES,
    MAX_RESULT_BYTES,
)
from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.options import ServerOptions
from ludus.env.targets.targets import TargetFactory
from ludus.env.workers.output import MAX_SERVER_BYTES, MAX_WORKER_BYTES, WINDOW_S
from ludus.proto.documents import MAX_DEPTH, MAX_JSON_BYTES, MAX_TEXT_BYTES, MAX_VALUES
from ludus.proto.metrics import EnvServerMetric, GatewayMetric
from ludus.services.gateway.config import GatewayConfig
from ludus.services.gateway.tenancy.access import TenantAccess

PAGE_TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def extract_file(name: str) -> str:
    """Return the content of a file from its shell command on the page."""
    match = re.search(rf"cat > {re.escape(name)} <<'END'\n(.*?)\nEND", PAGE_TEXT, re.DOTALL)
    assert match, f"docs/security.md contains no file {name}"
    return match[1]


def test_documented_tenants_file_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_A_TOKEN", "0123456789abcdef0123")
    (tmp_path / "operator.token").write_text("abcdef0123456789abcd\n")
    path = tmp_path / "tenants.toml"
    path.write_text(extract_file("tenants.toml"))
    access = TenantAccess.from_file(path)
    assert access.authenticate("Bearer 0123456789abcdef0123").limits.max_sessions == 512
    assert access.authenticate("Bearer abcdef0123456789abcd").name == "operator"


def assert_page_contains(*statements: str) -> None:
    assert [statement for statement in statements if statement not in PAGE_TEXT] == []


@pytest.mark.parametrize("name", ["gateway.toml", "fleet.toml"])
def test_documented_gateway_files_are_valid(name: str) -> None:
    GatewayConfig.parse(tomllib.loads(extract_file(name)))


def test_documented_limits_match_the_code() -> None:
    head, message = f"{MAX_HEAD_BYTES >> 10} KiB", f"{MAX_MESSAGE_BYTES >> 20} MiB"
    assert_page_contains(
        f"| request line and headers | {head}, complete within {HEAD_TIMEOUT_S:g} s |",
        f"between two parts of an HTTP body | {head} |",
        f"| {message}, complete within {BODY_TIMEOUT_S:g} s |",
        f"| WebSocket message | {message}, in at most {MAX_FRAGMENTS:,} fragments |",
        f"with its TLS handshake | complete within {HEAD_TIMEOUT_S:g} s |",
        f"| one call over gRPC | {message} |",
        f"| calls in one gRPC message | {MAX_CALLS_PER_MESSAGE:,} |",
        f"| fields of one gRPC message, counted before it is parsed | {MAX_CALL_FIELDS:,} |",
        f"counted before it is parsed | {MAX_JSON_VALUES:,} | 413;",
        f"| result of an environment for one call | {MAX_RESULT_BYTES >> 20} MiB |",
        f"at most {MAX_CALLS_AHEAD:,} calls or {MAX_BYTES_AHEAD >> 20} MiB in flight",
        f"| size of a TOML or YAML file | {MAX_TEXT_BYTES >> 20} MiB;",
        f"| size of a JSON file | {MAX_JSON_BYTES >> 20} MiB |",
        f"| sections and lists inside each other | {MAX_DEPTH} |",
        f"counted each time | {MAX_VALUES:,} |",
    )


def test_documented_limits_of_workers_match_the_code() -> None:
    options = ServerOptions()
    assert_page_contains(
        f"at most {options.max_processes:,} processes and threads of a worker",
        f"`--disk-limit-mb` ({options.disk_limit_mb})",
        f"may print {MAX_WORKER_BYTES >> 10} KiB in {WINDOW_S:g} s",
        f"all workers together {MAX_SERVER_BYTES >> 10} KiB",
    )


def test_documented_layers_match_the_sandbox() -> None:
    section = PAGE_TEXT.partition("## The workers' sandbox")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == list(Layer)
    assert str(EnvServerMetric.SANDBOX_LAYER) in section


def test_documented_queries_use_exported_metrics() -> None:
    metric_names = set(re.findall(r"ludus_gateway_[a-z_]+", PAGE_TEXT))
    assert metric_names
    assert {name.removesuffix("_total") for name in metric_names} <= set(GatewayMetric)


def test_documented_environments_without_network_are_those_that_declare_it() -> None:
    sentence = PAGE_TEXT.partition("The environments\n")[2].partition("declare")[0]
    folders = (Path(__file__).parents[2] / "envs").glob("*_env")
    names = [path.name for path in folders if not TargetFactory(path.name, {}).needs_network]
    assert re.findall(r"`([a-z_]+_env)`", sentence) == sorted(names)
