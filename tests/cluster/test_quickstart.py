"""Every command of docs/kubernetes-quickstart.md, in order, in a new namespace."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.installed import ROOT, find_skip_reason, kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
PAGE = ROOT / "docs/kubernetes-quickstart.md"
CODE_BLOCKS = re.findall(
    r"^```bash *(\w*)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S
)
NUM_STEPS = 10
"""Number of training steps; test_run.py trains a full run."""


@dataclass
class Walkthrough:
    """The namespace of the page's commands and the first command that failed."""

    namespace: str = field(default_factory=lambda: f"ludus-test-{secrets.token_hex(3)}")
    failed_block: str = ""

    def run(self, block: str) -> None:
        """Run a code block of the page in a shell, in this namespace instead of `arena`."""
        search_path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        start_s = time.monotonic()
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.replace("arena", self.namespace)],
            cwd=ROOT,
            env=os.environ | {"PATH": search_path},
            capture_output=True,
            text=True,
        )
        sys.stdout.write(f"\n$ {block}{result.stdout}({time.monotonic() - start_s:.1f} s)\n")
        if result.returncode:
            self.failed_block = block
        assert result.returncode == 0, result.stderr[-4000:]


@pytest.fixture(scope="module")
def walkthrough() -> Iterator[Walkthrough]:
    walkthrough = Walkthrough()
    yield walkthrough
    kubectl("delete", "namespace", walkthrough.namespace, "--ignore-not-found", "--wait=false")


def find_block_skip_reason(kind: str, block: str) -> str:
    """Return the reason to skip a code block, or '' if the test can run it."""
    if kind == "setup":
        return "SKIPPED, NOT PASSED: `make cluster-test` has run the setup"
    if kind == "cluster":
        return "SKIPPED, NOT PASSED: the cluster exists already"
    if kind == "operator" and "rayjobs.ray.io" in kubectl("get", "crd", "-o", "name"):
        return "SKIPPED, NOT PASSED: the cluster has KubeRay already"
    if kind == "grafana":
        return "SKIPPED, NOT PASSED: Grafana's chart and image come from the internet"
    if kind == "monitoring" and "monitoring.coreos.com" not in kubectl("get", "crd", "-o", "name"):
        return "SKIPPED, NOT PASSED: the cluster has no Prometheus operator"
    if kind == "images":
        arguments = re.search(r'ARGS="(.*)"', block)
        assert arguments and arguments[1] in (ROOT / "dev/cluster_test.sh").read_text(
            encoding="utf-8"
        )
        return "SKIPPED, NOT PASSED: dev/cluster_test.sh has loaded the images"
    return ""


@pytest.mark.parametrize(
    ("kind", "block"),
    CODE_BLOCKS,
    ids=[f"{index}-{kind}" for index, (kind, _) in enumerate(CODE_BLOCKS, 1)],
)
def test_quickstart_command_succeeds(
    walkthrough: Walkthrough, kind: str, block: str, tmp_path: Path
) -> None:
    assert not walkthrough.failed_block, f"an earlier command failed: {walkthrough.failed_block}"
    if reason := find_block_skip_reason(kind, block):
        pytest.skip(reason)
    folder_option = f"--folder {tmp_path}/results\n"
    if kind == "submit":
        walkthrough.run(f"{block.rstrip()} --dry-run > {tmp_path}/run.yaml\n")
        block = f"{block.rstrip()} --set training.num_steps={NUM_STEPS} {folder_option}"
    if kind in ("logs", "fetch"):
        block = f"{block.rstrip()} {folder_option}"
    walkthrough.run(block)
