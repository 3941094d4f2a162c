"""`skaffold run`, which builds, pushes and installs the gateway and an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.installed import ROOT, Release, create_namespace, find_skip_reason, helm
from tests.cluster.registry import run_registry


def _find_skip_reason() -> str:
    if find_skip_reason():
        return find_skip_reason()
    if shutil.which("skaffold") is None:
        return "SKIPPED, NOT PASSED: skaffold not found in PATH"
    if not any(map(shutil.which, ("buildah", "podman"))):
        return "SKIPPED, NOT PASSED: neither buildah nor podman found in PATH"
    if not os.environ.get("LUDUS_IMAGE_LOADER"):
        return "SKIPPED, NOT PASSED: set LUDUS_IMAGE_LOADER to the command that loads images"
    return ""


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_find_skip_reason()), reason=_find_skip_reason()),
]


def test_skaffold_builds_and_installs_servers(tmp_path: Path) -> None:
    with create_namespace() as target_namespace, run_registry() as registry:
        target_options = (
            "--profile",
            "buildah,serving",
            "--default-repo",
            registry,
            "--namespace",
            target_namespace,
        )
        variables = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SKAFFOLD_UPDATE_CHECK": "false",
        }
        cache_options = ("--config", str(tmp_path / "config"), "--cache-artifacts=false")
        log_path = tmp_path / "skaffold.log"
        with log_path.open("wb") as log:
            result = subprocess.run(
                ["skaffold", "run", *target_options, *cache_options],
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=log,
            )
        assert result.returncode == 0, log_path.read_text(encoding="utf-8", errors="replace")[
            -4000:
        ]
        release = Release("ludus", target_namespace)
        release.wait_until_ready()
        pods = release.get("pods")["items"]
        components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods}
        assert components == {"gateway", "environment"}
        for pod in pods:
            (container,) = pod["spec"]["containers"]
            assert container["image"].startswith(f"{registry}/docker_io_ludus_")
        output = helm("test", "ludus", "--namespace", target_namespace, "--timeout", "180s")
        assert "Succeeded" in output and "Failed" not in output
