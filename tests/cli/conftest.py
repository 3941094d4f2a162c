"""Fixtures that run `ludus` commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ludus.services.cli import app, trainer_process
from ludus.services.runs import follow
from tests.cli.cluster_runs import CONFIG, find_requests_beyond_role
from tests.cli.commands import FAKE_TRAINER_PATH, Outcome, RunCli
from tests.gateway.fake_kubernetes import Call, run_cluster_in_thread
from tests.runs.cluster import install_release
from tests.runs.release import NAMESPACE


@pytest.fixture
def ludus(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> RunCli:
    """Return a function that runs `ludus ARGUMENTS` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    for module in ("env.serving.loopback", "services.cli.env_targets"):
        monkeypatch.setattr(f"ludus.{module}.CONNECT_TIMEOUT_S", 60.0)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ludus", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            app.main()
        out, err = capfd.readouterr()
        code = exit_info.value.code
        return Outcome(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture(autouse=True)
def hide_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the cluster of the machine that runs the tests."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))


@pytest.fixture
def use_fake_trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that replaces the trainer with a scenario of the fake trainer."""

    def use_scenario(scenario: str) -> None:
        command = [sys.executable, str(FAKE_TRAINER_PATH), scenario]
        monkeypatch.setattr(
            trainer_process, "build_trainer_command", lambda arguments: [*command, *arguments]
        )

    return use_scenario


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Start a fake cluster with a Ludus release, and make it the current kubectl context."""
    monkeypatch.setattr(follow, "POLL_INTERVAL_S", 0.05)
    with run_cluster_in_thread() as (url, call):
        call(install_release)
        context_fields = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "secret-token"}}],
            "contexts": [{"name": "x", "context": context_fields}],
            "current-context": "x",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig))
        monkeypatch.setenv("KUBECONFIG", str(path))
        (tmp_path / "run.toml").write_text(CONFIG)
        yield call
        assert call(find_requests_beyond_role) == set()
