"""A run that `ludus submit` follows, as the person sees it who has submitted it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludus.proto.runs import METRICS_FILE, SUMMARY_FILE, MetricsRow, Summary
from tests.cluster.installed import ROOT, Installed, kubectl, until

EXAMPLE = "examples/blackjack/tiny.toml"
ROLES = ("head", "learner", "rollout")
STALL_S = 420.0
"""Longest time without a step that a test puts up with: a node must be given up, pods made anew."""


class Training:
    """A run of the release, and its progress as it is told on the terminal."""

    def __init__(self, release: Installed, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._release = release
        self._folder = folder
        self._process = process

    @property
    def said(self) -> str:
        """What `ludus submit` has said so far."""
        return log_path(self._folder).read_text(encoding="utf-8", errors="replace")

    @property
    def step(self) -> int:
        """The last step that it has told of."""
        return max(map(int, re.findall(r"step (\d+)/", self.said)), default=0)

    @property
    def is_over(self) -> bool:
        """True when the command has ended."""
        return self._process.poll() is not None

    def pods(self) -> dict[str, Any]:
        """The pod of each role that runs and is not about to end."""
        return {
            pod["metadata"]["labels"]["ludus.dev/group"]: pod
            for pod in self._release.get("pods", "-l", "ludus.dev/group")["items"]
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def pod_of(self, role: str) -> str:
        """Name of the pod of that role, once there is one."""
        until(lambda: role in self.pods(), f"a {role} pod", STALL_S)
        return str(self.pods()[role]["metadata"]["name"])

    def node_of(self, role: str) -> str:
        """Name of the node with the pod of that role, once there is one."""
        until(lambda: role in self.pods(), f"a {role} pod", STALL_S)
        return str(self.pods()[role]["spec"]["nodeName"])

    def go_on(self, num_steps: int = 2) -> None:
        """Wait until so many steps more are told of."""
        goal = self.step + num_steps

        def went_on() -> bool:
            assert not self.is_over, self.said[-3000:]
            return self.step >= goal

        until(went_on, f"step {goal}", STALL_S)

    def finish(self) -> Summary:
        """What it came to, as it was fetched."""
        until(lambda: self.is_over, "the run's end", 1500)
        assert self._process.returncode == 0, self.said[-4000:]
        return Summary.model_validate_json((self._folder / SUMMARY_FILE).read_bytes())

    @property
    def rows(self) -> list[MetricsRow]:
        """The metrics that were fetched."""
        lines = (self._folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [MetricsRow.model_validate_json(line) for line in lines]


def end_runs(release: Installed) -> None:
    """Delete all runs; who follows one no longer has not ended it, and pods outlive their run."""
    kubectl("-n", release.namespace, "delete", "rayjobs", "--all")


def log_path(folder: Path) -> Path:
    """Where the words of the command lie."""
    return folder.with_suffix(".log")


@contextmanager
def submitted(release: Installed, folder: Path, *settings: str) -> Iterator[Training]:
    """A run whose results come to `folder`; who leaves early stops following it."""
    place = ("--namespace", release.namespace, "--folder", str(folder))
    words = [word for setting in settings for word in ("--set", setting)]
    command = [str(Path(sys.executable).with_name("ludus")), "submit", EXAMPLE, *place, *words]
    with log_path(folder).open("wb") as written:
        process = subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=written)
    try:
        yield Training(release, folder, process)
    finally:
        process.kill()
        process.wait()
