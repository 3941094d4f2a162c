"""A run that `ludus submit` starts and follows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludus.proto.runs import METRICS_FILE, SUMMARY_FILE, MetricsRow, Summary
from tests.cluster.installed import ROOT, Release, kubectl, wait_until

EXAMPLE_CONFIG = "examples/blackjack/tiny.toml"
ROLES = ("head", "learner", "rollout")
STALL_TIMEOUT_S = 420.0
"""Maximum time without a step, in seconds. Includes the replacement of a failed node's pods."""


class Training:
    """A run whose progress is read from the output of `ludus submit`."""

    def __init__(self, release: Release, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._release = release
        self._folder = folder
        self._process = process

    @property
    def output(self) -> str:
        """The output of `ludus submit` so far."""
        return make_log_path(self._folder).read_text(encoding="utf-8", errors="replace")

    @property
    def step(self) -> int:
        """The highest reported step."""
        return max(map(int, re.findall(r"step (\d+)/", self.output)), default=0)

    @property
    def has_exited(self) -> bool:
        """True if `ludus submit` has exited."""
        return self._process.poll() is not None

    def find_pods(self) -> dict[str, Any]:
        """Return the running pod of each role, excluding terminating pods."""
        return {
            pod["metadata"]["labels"]["ludus.dev/group"]: pod
            for pod in self._release.get("pods", "-l", "ludus.dev/group")["items"]
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def find_pod(self, role: str) -> str:
        """Wait for the pod of a role; return its name."""
        wait_until(lambda: role in self.find_pods(), f"a {role} pod", STALL_TIMEOUT_S)
        return str(self.find_pods()[role]["metadata"]["name"])

    def find_node(self, role: str) -> str:
        """Wait for the pod of a role; return the name of its node."""
        wait_until(lambda: role in self.find_pods(), f"a {role} pod", STALL_TIMEOUT_S)
        return str(self.find_pods()[role]["spec"]["nodeName"])

    def wait_for_steps(self, num_steps: int = 2) -> None:
        """Wait until `num_steps` more steps have been reported."""
        target_step = self.step + num_steps

        def has_reached_target() -> bool:
            assert not self.has_exited, self.output[-3000:]
            return self.step >= target_step

        wait_until(has_reached_target, f"step {target_step}", STALL_TIMEOUT_S)

    def finish(self) -> Summary:
        """Wait until `ludus submit` exits; return the fetched summary."""
        wait_until(lambda: self.has_exited, "the run to end", 1500)
        assert self._process.returncode == 0, self.output[-4000:]
        return Summary.model_validate_json((self._folder / SUMMARY_FILE).read_bytes())

    @property
    def rows(self) -> list[MetricsRow]:
        """Rows of the fetched metrics file."""
        lines = (self._folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [MetricsRow.model_validate_json(line) for line in lines]


def end_runs(release: Release) -> None:
    """Delete all runs, because a run continues after `ludus submit` exits."""
    kubectl("-n", release.namespace, "delete", "rayjobs", "--all")


def make_log_path(folder: Path) -> Path:
    """Return the path of the file with the output of `ludus submit`."""
    return folder.with_suffix(".log")


@contextmanager
def submit(release: Release, folder: Path, *settings: str) -> Iterator[Training]:
    """Submit a run whose results are fetched to `folder`; kill `ludus submit` on exit."""
    options = ("--namespace", release.namespace, "--folder", str(folder))
    set_options = [option for setting in settings for option in ("--set", setting)]
    command = [
        str(Path(sys.executable).with_name("ludus")),
        "submit",
        EXAMPLE_CONFIG,
        *options,
        *set_options,
    ]
    with make_log_path(folder).open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield Training(release, folder, process)
    finally:
        process.kill()
        process.wait()
