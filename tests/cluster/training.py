"""A run that `ludus submit` follows, as its user sees it."""

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

EXAMPLE = "examples/blackjack/tiny.toml"
ROLES = ("head", "learner", "rollout")
STALL_TIMEOUT_S = 420.0
"""Maximum seconds without a step: a node must be given up and its pods replaced in this time."""


class Training:
    """A run of the release, with its progress from the output of `ludus submit`."""

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
        """The last reported step."""
        return max(map(int, re.findall(r"step (\d+)/", self.output)), default=0)

    @property
    def has_exited(self) -> bool:
        """True after the command has exited."""
        return self._process.poll() is not None

    def find_pods(self) -> dict[str, Any]:
        """Return the pod of each role that runs and is not terminating."""
        return {
            pod["metadata"]["labels"]["ludus.dev/group"]: pod
            for pod in self._release.get("pods", "-l", "ludus.dev/group")["items"]
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def find_pod(self, role: str) -> str:
        """Wait for the pod of this role; return its name."""
        wait_until(lambda: role in self.find_pods(), f"a {role} pod", STALL_TIMEOUT_S)
        return str(self.find_pods()[role]["metadata"]["name"])

    def find_node(self, role: str) -> str:
        """Wait for the pod of this role; return the name of its node."""
        wait_until(lambda: role in self.find_pods(), f"a {role} pod", STALL_TIMEOUT_S)
        return str(self.find_pods()[role]["spec"]["nodeName"])

    def wait_for_steps(self, num_steps: int = 2) -> None:
        """Wait until this number of additional steps is reported."""
        goal = self.step + num_steps

        def has_reached_goal() -> bool:
            assert not self.has_exited, self.output[-3000:]
            return self.step >= goal

        wait_until(has_reached_goal, f"step {goal}", STALL_TIMEOUT_S)

    def finish(self) -> Summary:
        """Wait for the end of the command; return the fetched summary."""
        wait_until(lambda: self.has_exited, "the run's end", 1500)
        assert self._process.returncode == 0, self.output[-4000:]
        return Summary.model_validate_json((self._folder / SUMMARY_FILE).read_bytes())

    @property
    def rows(self) -> list[MetricsRow]:
        """Return the fetched metrics."""
        lines = (self._folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [MetricsRow.model_validate_json(line) for line in lines]


def end_runs(release: Release) -> None:
    """Delete all runs and wait for their pods, because runs outlive `ludus submit`."""
    kubectl("-n", release.namespace, "delete", "rayjobs", "--all")


def make_log_path(folder: Path) -> Path:
    """Return the path of the command's output."""
    return folder.with_suffix(".log")


@contextmanager
def submit(release: Release, folder: Path, *settings: str) -> Iterator[Training]:
    """Submit a run that fetches its results to `folder`; stop following it on exit."""
    options = ("--namespace", release.namespace, "--folder", str(folder))
    set_options = [option for setting in settings for option in ("--set", setting)]
    command = [
        str(Path(sys.executable).with_name("ludus")),
        "submit",
        EXAMPLE,
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
