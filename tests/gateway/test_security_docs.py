"""Consistency of docs/security.md with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ludus.env.asgi.uvicorn_protocols import HEAD_TIMEOUT_S, MAX_HEAD_BYTES
from ludus.env.limits import BODY_TIMEOUT_S, MAX_CALLS_PER_MESSAGE, MAX_MESSAGE_BYTES
from ludus.env.sandbox.confine import Layer
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


@pytest.mark.parametrize("name", ["gateway.toml", "fleet.toml"])
def test_documented_gateway_files_are_valid(name: str) -> None:
    GatewayConfig.parse(tomllib.loads(extract_file(name)))


def test_documented_limits_match_the_code() -> None:
    for row in (
        f"| request line and headers | {MAX_HEAD_BYTES // 1024} KiB, complete within"
        f" {HEAD_TIMEOUT_S:g} s |",
        f"| {MAX_MESSAGE_BYTES >> 20} MiB, complete within {BODY_TIMEOUT_S:g} s |",
        f"| one call over gRPC | {MAX_MESSAGE_BYTES >> 20} MiB |",
        f"| calls in one gRPC message | {MAX_CALLS_PER_MESSAGE:,} |",
        f"| steps in one call | {MAX_CALLS_PER_MESSAGE:,} |",
    ):
        assert row in PAGE_TEXT


def test_documented_layers_match_the_sandbox() -> None:
    section = PAGE_TEXT.partition("## The workers' sandbox")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == list(Layer)
    assert str(EnvServerMetric.SANDBOX_LAYER) in section


def test_documented_queries_use_exported_metrics() -> None:
    metric_names = set(re.findall(r"ludus_gateway_[a-z_]+", PAGE_TEXT))
    assert metric_names
    assert {name.removesuffix("_total") for name in metric_names} <= set(GatewayMetric)
