from __future__ import annotations

import argparse
import inspect
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.env.client import EnvClient
from ludus.env.recording.format import read_recording
from ludus.env.serving.application import add_server_arguments
from ludus.env.sessions.options import DEFAULT_PORT
from ludus.services.cli.env_serve import serve
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow


def test_serve_command_has_every_server_option(ludus: RunCli) -> None:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser, DEFAULT_PORT)
    flags = set(re.findall(r"--[a-z][a-z-]*", parser.format_usage())) | {"--help"}
    help_text = ludus("env", "serve", "--help").out
    assert {flag for flag in flags if flag not in help_text} == set()
    # `serve` has the parameters `target` and `options`, but none for --help.
    assert len(inspect.signature(serve).parameters) == len(flags) + 1


def test_serve_command_records_episodes_with_process_isolation(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-c", "from ludus.services.cli.app import main; main()"),
        *("env", "serve", "gymnasium:FrozenLake-v1", "--port=0", "--isolation=process"),
        *("--step-timeout-s=20", "--max-sessions=2", "--record", str(tmp_path / "episodes.jsonl")),
        *("--first-seed=40", "--no-determinism-check"),
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    address = re.search(r"grpc://\S+", server.stderr.readline())
    assert address is not None
    with EnvClient.connect(address.group()) as client:
        session, _ = client.open()
        session.step(text="LEFT")
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    assert server.returncode == 0
    (episode,) = read_recording(tmp_path / "episodes.jsonl")
    assert (episode.seed, len(episode.steps)) == (40, 1)
    assert episode.environment.target == "gymnasium:FrozenLake-v1"


def test_memory_limit_without_process_isolation_is_refused(ludus: RunCli) -> None:
    result = ludus("env", "serve", "openspiel_env", "--port", "0", "--memory-limit-mb", "100")
    assert result.code == 2
    assert "isolation" in result.err
