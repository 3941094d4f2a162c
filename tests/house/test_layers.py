"""Heavy packages that light programs must not import, and generated files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEAVY_PACKAGES = ("torch", "ray", "vllm", "transformers", "kubernetes")


@pytest.mark.parametrize(
    "module",
    [
        "ludus.proto.config",
        "ludus.env.client",
        "ludus.services.cli.app",
        "ludus.services.gateway.gateway",
    ],
)
def test_module_import_loads_no_heavy_package(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY_PACKAGES} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_the_environment_server_loads_no_heavy_package() -> None:
    code = (
        "import sys, ludus.env.serving.server\n"
        f"print([m for m in {HEAVY_PACKAGES} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_network_run_does_not_import_ray_vllm_or_transformers() -> None:
    packages = ("ray", "vllm", "transformers")
    code = (
        f"import sys, ludus.trainer.classic.run\nprint([m for m in {packages} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize(
    "script_name",
    [
        "chart_docs.py",
        "commands_docs.py",
        "configuration_docs.py",
        "fleet_metrics_docs.py",
        "gateway_docs.py",
        "memory_docs.py",
        "generate_proto.py",
        "metrics_docs.py",
        "variables_docs.py",
    ],
)
def test_generated_files_match_their_sources(script_name: str) -> None:
    script = ROOT / "dev" / script_name
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
