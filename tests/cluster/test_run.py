"""Training through `ludus submit` and KubeRay, on a release of values-cpu.yaml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ludus.proto.runs import SUMMARY_FILE, Summary
from tests.cluster.installed import CHART, ROOT, TIMEOUT_S, installed, until, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
ROLES = ("head", "learner", "rollout")


def test_a_submitted_run_learns_blackjack_on_several_nodes(tmp_path: Path) -> None:
    with installed([CHART / "values-cpu.yaml"]) as release:
        results, log = tmp_path / "results", tmp_path / "submit.log"
        place = ("--namespace", release.namespace, "--folder", str(results))
        example = "examples/blackjack/tiny.toml"
        command = [str(Path(sys.executable).with_name("ludus")), "submit", example, *place]
        with log.open("wb") as written:
            submitted = subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=written)
        try:
            nodes: dict[str, str] = {}

            def everybody_runs() -> bool:
                for pod in release.get("pods", "-l", "ludus.dev/group")["items"]:
                    if pod["status"]["phase"] == "Running":
                        group = pod["metadata"]["labels"]["ludus.dev/group"]
                        nodes[group] = pod["spec"]["nodeName"]
                return submitted.poll() is not None or set(nodes) == set(ROLES)

            until(everybody_runs, "head, learner and rollout worker", TIMEOUT_S)
            submitted.wait(1500)
        finally:
            submitted.kill()
        said = log.read_text(encoding="utf-8", errors="replace")
        assert submitted.returncode == 0, said[-4000:]
        assert nodes["learner"] != nodes["rollout"]
        summary = Summary.model_validate_json((results / SUMMARY_FILE).read_bytes())
        assert summary.gap_closed is not None and summary.gap_closed >= 0.90
        assert summary.canary_failures == 0
