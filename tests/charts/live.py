"""A real Prometheus that scrapes a real gateway, environment server and run exporter."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ludus.env.client import AsyncEnvClient
from ludus.proto.metrics import EvalMetric, Reduction, TrainMetric
from ludus.proto.runs import MetricsRow, Phase
from ludus.trainer.run.prometheus import PrometheusExporter
from tests.charts.promtool import find_program
from tests.sinks.mixed_run import make_phase_row, make_run_config, make_weights_row

SCRAPE_INTERVAL = "2s"
NAMESPACE = "ludus"
_STEP_VALUES = {
    TrainMetric.NUM_WINS: 10.0,
    TrainMetric.NUM_DRAWS: 5.0,
    TrainMetric.NUM_LOSSES: 25.0,
    TrainMetric.NUM_EPISODES_FINISHED: 40.0,
    TrainMetric.NUM_EPISODES_SCORED: 40.0,
    TrainMetric.NUM_EPISODES: 40.0,
    TrainMetric.NUM_EPISODES_LOST: 0.0,
    TrainMetric.NUM_EPISODES_FAILED: 0.0,
    TrainMetric.NUM_TOOL_CALLS: 12.0,
    TrainMetric.NUM_TOOL_CALLS_FAILED: 3.0,
    TrainMetric.NUM_EPISODES_WITH_TOOL_CALLS: 10.0,
    TrainMetric.NUM_GROUPS: 10.0,
    TrainMetric.NUM_TOKENS_FORWARDED: 900.0,
    TrainMetric.NUM_TOKENS_IN_BATCH: 800.0,
    TrainMetric.NUM_TOKENS_TRAINED: 300.0,
    TrainMetric.NUM_TOKENS_GENERATED: 400.0,
    TrainMetric.NUM_CANARY_FAILURES: 0.0,
    TrainMetric.NUM_LEARNER_RESTARTS: 0.0,
    TrainMetric.STEP_S: 2.0,
}
ENVIRONMENT_OPTIONS = {"blackjack": {}, "tic_tac_toe": {"opponent": "first"}}


@contextmanager
def run_prometheus(
    folder: Path, targets: Mapping[str, str], rules: Sequence[Path] = ()
) -> Iterator[str]:
    """Start Prometheus for the targets, and yield the address of Prometheus.

    The targets have the labels that the chart's monitors add.
    """
    jobs = [
        {
            "job_name": pod,
            "static_configs": [
                {
                    "targets": [address.removeprefix("http://")],
                    "labels": {"namespace": NAMESPACE, "pod": pod, "environment": "counting"}
                    if pod == "server"
                    else {"namespace": NAMESPACE, "pod": pod},
                }
            ],
        }
        for pod, address in targets.items()
    ]
    config = {
        "global": {
            "scrape_interval": SCRAPE_INTERVAL,
            "scrape_timeout": SCRAPE_INTERVAL,
            "evaluation_interval": "1s",
        },
        "scrape_configs": jobs,
        "rule_files": [str(path) for path in rules],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                find_program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        yield f"http://127.0.0.1:{_find_listening_port(process.pid, log)}"
    finally:
        process.terminate()
        process.wait(60)


def fetch_series(address: str, query: str) -> list[dict[str, Any]]:
    """Return the series of a query, each with labels and a value."""
    encoded_query = urllib.parse.quote(query)
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?query={encoded_query}") as response:
            return json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        assert error.code == 503, f"{error.read().decode()}: {query}"
        return []


async def play_sessions(address: str, stop_event: asyncio.Event) -> None:
    """Open, step, reset and close sessions until `stop_event` is set."""
    async with await AsyncEnvClient.connect(address) as client:
        while not stop_event.is_set():
            session, _ = await client.open(seed=1)
            async with session:
                for _ in range(5):
                    await session.step({"add": 1})
                    await asyncio.sleep(0.01)
                await session.reset(seed=2)


async def write_training_rows(exporter: PrometheusExporter, stop_event: asyncio.Event) -> None:
    """Write the rows of a training run, one step every half second."""
    exporter.set_environment_options(ENVIRONMENT_OPTIONS)
    exporter.write(make_phase_row(Phase.TRAIN))
    step = 0
    while not stop_event.is_set():
        step += 1
        for row in make_rows(step):
            exporter.write(row)
        await asyncio.sleep(0.5)


def report_failures(exporter: PrometheusExporter) -> None:
    """Report a failed canary and a restarted learner."""
    for metric in (TrainMetric.NUM_CANARY_FAILURES, TrainMetric.NUM_LEARNER_RESTARTS):
        exporter.write(_make_row("event", 1, {metric: 1.0}))


def make_rows(step: int) -> list[MetricsRow]:
    """Return the rows of a step in which every metric has a value."""
    environment_values = {
        metric: make_value(metric) for metric in TrainMetric if metric.spec.is_per_environment
    } | {"reward_term.format": 0.5}
    run_values = {
        metric: make_value(metric) for metric in TrainMetric if not metric.spec.is_per_environment
    }
    eval_values = dict.fromkeys(EvalMetric, 0.4)
    hashes = {0: "00000000000a", 1: "00000000000a"}
    metrics_rows = [_make_row("train", step, run_values), make_weights_row(step, hashes)]
    for name in ENVIRONMENT_OPTIONS:
        metrics_rows.append(_make_row("environment", step, environment_values, name))
        metrics_rows.append(_make_row("eval", step, eval_values, name))
        metrics_rows.append(_make_row("baseline", step, eval_values, name, "random"))
    return metrics_rows


def make_value(metric: TrainMetric) -> float:
    """Return a plausible value. Counts grow, and parts are less than their totals."""
    if metric in _STEP_VALUES:
        return _STEP_VALUES[metric]
    if metric.spec.reduction is Reduction.SUM:
        return {"s": 0.4, "bytes": 1e6}.get(metric.spec.unit, 1.0)
    return 0.01


def _make_row(
    kind: str,
    step: int,
    values: Mapping[Any, float],
    environment: str | None = None,
    policy: str | None = None,
) -> MetricsRow:
    return MetricsRow.model_validate(
        {
            "kind": kind,
            "step": step,
            "environment": environment,
            "policy": policy,
            "elapsed_s": 0.5 * step,
            "num_games_trained": 100 * step,
            "values": values,
        }
    )


def start_exporter() -> PrometheusExporter:
    """Start the exporter of the run `mixed`."""
    config = make_run_config(prometheus={})
    assert config.metrics.prometheus is not None
    return PrometheusExporter(config, config.metrics.prometheus)


def _find_listening_port(pid: int, log: Path) -> int:
    """Return the port that the process listens on, read from /proc.

    Prometheus logs only the configured port.
    """
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        sockets = {
            os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
        }
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                    return int(columns[1].rpartition(":")[2], 16)
        time.sleep(0.05)
    raise AssertionError(f"Prometheus opened no port within 120 s: {log.read_text()}")
