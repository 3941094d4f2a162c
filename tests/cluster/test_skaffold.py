"""`skaffold run` with a custom builder: gateway and environment, built, brought and installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.installed import ROOT, Installed, helm, namespace, why_not
from tests.cluster.registry import registry


def _why_not() -> str:
    if why_not():
        return why_not()
    if shutil.which("skaffold") is None:
        return "SKIPPED, NOT PASSED: skaffold not found in PATH"
    if not any(map(shutil.which, ("buildah", "podman"))):
        return "SKIPPED, NOT PASSED: neither buildah nor podman builds images here"
    if not os.environ.get("LUDUS_IMAGE_LOADER"):
        return "SKIPPED, NOT PASSED: set LUDUS_IMAGE_LOADER to what brings an image to the nodes"
    return ""


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_why_not()), reason=_why_not()),
]


def test_skaffold_builds_and_installs_what_serves(tmp_path: Path) -> None:
    with namespace() as place, registry() as images:
        chosen = ("--profile", "buildah,serving", "--default-repo", images, "--namespace", place)
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SKAFFOLD_UPDATE_CHECK": "false",
        }
        own = ("--config", str(tmp_path / "config"), "--cache-artifacts=false")
        log_file = tmp_path / "skaffold.log"
        with log_file.open("wb") as log:
            done = subprocess.run(
                ["skaffold", "run", *chosen, *own],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )
        assert done.returncode == 0, log_file.read_text(encoding="utf-8", errors="replace")[-4000:]
        release = Installed("ludus", place)
        release.wait_until_ready()
        pods = release.get("pods")["items"]
        parts = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods}
        assert parts == {"gateway", "environment"}
        for pod in pods:
            (container,) = pod["spec"]["containers"]
            assert container["image"].startswith(f"{images}/docker_io_ludus_")
        said = helm("test", "ludus", "--namespace", place, "--timeout", "180s")
        assert "Succeeded" in said and "Failed" not in said
