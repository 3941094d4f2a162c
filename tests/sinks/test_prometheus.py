from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ludus.proto.errors import ConfigError
from ludus.proto.metrics import EvalMetric, Reduction, TrainMetric, TrainSeries, prometheus_name
from ludus.proto.runs import MetricsRow, Phase
from ludus.trainer.run.prometheus import PrometheusExporter, RunSeries
from ludus.trainer.run.sinks import open_sinks
from tests.sinks.mixed_run import eval_rows, event, phase, run_config, step_rows, weights_row

pytestmark = pytest.mark.slow

BLACKJACK = ("environment=blackjack", "opponent=environment")
TIC_TAC_TOE = ("environment=tic_tac_toe", "opponent=first")
OPTIONS = {"blackjack": {"game": "blackjack"}, "tic_tac_toe": {"opponent": "first"}}
"""Options of both environments."""


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    run = run_config(prometheus={})
    assert run.metrics.prometheus is not None
    exporter = PrometheusExporter(run, run.metrics.prometheus)
    exporter.set_environment_options(OPTIONS)
    yield exporter
    exporter.close()


def scrape(exporter: PrometheusExporter) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=60) as reply:
        return reply.read().decode()


def samples(exporter: PrometheusExporter) -> dict[tuple[str, ...], float]:
    """Return the values by name and labels, without the label `run`."""
    values = {}
    for family in text_string_to_metric_families(scrape(exporter)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "mixed"
            key = (sample.name, *(f"{label}={value}" for label, value in labels.items()))
            values[key] = sample.value
    return values


def write(exporter: PrometheusExporter, *rows: MetricsRow) -> None:
    for row in rows:
        exporter.write(row)


def test_counters_start_at_zero_and_gauges_when_measured(
    exporter: PrometheusExporter,
) -> None:
    previous = samples(exporter)
    for metric in TrainMetric:
        name = prometheus_name(metric)
        is_counter = metric.spec.reduction is Reduction.SUM
        labels = (BLACKJACK, TIC_TAC_TOE) if metric.spec.is_per_environment else ((),)
        for series_values in labels:
            assert previous.get((f"{name}_total", *series_values)) == (0 if is_counter else None)
            assert (name, *series_values) not in previous
    assert previous[TrainSeries.RUN,] == 1


def test_counters_add_up_and_gauges_show_the_latest_value(exporter: PrometheusExporter) -> None:
    write(exporter, *step_rows(1), *step_rows(2), *eval_rows(2, 0.4))
    values = samples(exporter)
    expected = {
        ("ludus_train_wins_total", *BLACKJACK): 20,
        ("ludus_train_draws_total", *BLACKJACK): 10,
        ("ludus_train_losses_total", *BLACKJACK): 50,
        ("ludus_train_wins_total", *TIC_TAC_TOE): 120,
        ("ludus_train_episodes_total", *TIC_TAC_TOE): 120,
        ("ludus_train_tokens_generated_total", *BLACKJACK): 560,
        ("ludus_train_win_rate", *BLACKJACK): 0.25,
        ("ludus_train_reward_term_mean", *TIC_TAC_TOE, "term=format"): 0.5,
        ("ludus_train_tokens_trained_total",): 2000,
        ("ludus_train_train_seconds_total",): 1.0,
        ("ludus_train_loss",): 0.5,
        ("ludus_train_step",): 2,
        ("ludus_train_steps_total",): 2,
        ("ludus_train_games_trained",): 200,
        ("ludus_train_eval_win_rate", *BLACKJACK, "policy=trained"): 0.4,
        ("ludus_train_eval_win_rate", *BLACKJACK, "policy=random"): 0.28,
    }
    assert {key: values.get(key) for key in expected} == expected
    # Values of environments are not counted again for the whole run.
    assert ("ludus_train_episodes_total",) not in values


def test_opened_environments_are_counted(
    exporter: PrometheusExporter,
) -> None:
    write(exporter, event(TrainMetric.NUM_UNLOCKS, "tic_tac_toe"))
    values = samples(exporter)
    assert values["ludus_train_unlocks_total", *TIC_TAC_TOE] == 1
    assert values["ludus_train_unlocks_total", *BLACKJACK] == 0


def test_exactly_one_phase_is_active(exporter: PrometheusExporter) -> None:
    for current in (Phase.START_WORKERS, Phase.TRAIN, Phase.EVALUATE):
        write(exporter, phase(current))
        values = samples(exporter)
        shown = {name: values["ludus_train_phase", f"phase={name}"] for name in Phase}
        assert shown == {name: float(name is current) for name in Phase}


def test_weights_of_removed_workers_disappear(exporter: PrometheusExporter) -> None:
    write(exporter, weights_row(3, {0: "00000000000a" + "f" * 50, 1: "00000000000b"}))
    values = samples(exporter)
    assert values["ludus_train_worker_weights_version", "worker=1"] == 3
    assert values["ludus_train_worker_weights_hash", "worker=0"] == 10
    assert values["ludus_train_worker_weights_hash", "worker=1"] == 11
    assert values["ludus_train_sampler_pause_seconds_total",] == 0.25
    write(exporter, weights_row(4, {1: "ffffffffffff"}))
    values = samples(exporter)
    assert values["ludus_train_workers",] == 1
    assert values["ludus_train_worker_weights_hash", "worker=1"] == 2**48 - 1
    assert ("ludus_train_worker_weights_version", "worker=0") not in values


def test_environments_appear_when_their_opponent_is_known() -> None:
    run = run_config(prometheus={})
    assert run.metrics.prometheus is not None
    exporter = PrometheusExporter(run, run.metrics.prometheus)
    try:
        write(exporter, *step_rows(1))
        assert not [key for key in samples(exporter) if "wins" in key[0]]
        exporter.set_environment_options(OPTIONS)
        assert samples(exporter)["ludus_train_wins_total", *TIC_TAC_TOE] == 60
    finally:
        exporter.close()


def test_times_of_steps_phases_and_checkpoints_are_exported() -> None:
    now = 1000.0
    series = RunSeries(run_config(), lambda: now)

    def times() -> list[float]:
        families = {family.name: family for family in series.collect()}
        names = (TrainSeries.PHASE_START, TrainSeries.LAST_STEP, TrainSeries.LAST_CHECKPOINT)
        return [families[name].samples[0].value for name in names]

    assert times() == [1000, 1000, 1000]
    now = 1001
    series.write(phase(Phase.TRAIN))
    assert times() == [1001, 1000, 1000]
    now = 1002
    series.write(step_rows(1)[0])
    assert times() == [1001, 1002, 1000]
    now = 1003
    series.write(event(TrainMetric.NUM_CANARY_FAILURES))
    assert times() == [1001, 1002, 1000]
    series.write(event(TrainMetric.NUM_CHECKPOINTS))
    assert times() == [1001, 1002, 1003]


def test_a_failed_canary_is_counted(exporter: PrometheusExporter) -> None:
    assert samples(exporter)["ludus_train_canary_failures_total",] == 0
    write(exporter, event(TrainMetric.NUM_CANARY_FAILURES))
    assert samples(exporter)["ludus_train_canary_failures_total",] == 1


def test_concurrent_scrapes_are_consistent(
    exporter: PrometheusExporter,
) -> None:
    num_steps, stop = 300, threading.Event()

    def train() -> None:
        for step in range(1, num_steps + 1):
            write(exporter, *step_rows(step), phase(Phase.TRAIN, step))
        stop.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    seen: list[float] = []
    while not stop.is_set() or not seen:
        values = samples(exporter)
        assert sum(values["ludus_train_phase", f"phase={name}"] for name in Phase) <= 1
        seen.append(values[("ludus_train_wins_total", *BLACKJACK)])
    trainer.join()
    assert seen == sorted(seen)
    assert samples(exporter)[("ludus_train_wins_total", *BLACKJACK)] == 10 * num_steps


def test_every_series_has_a_help_text(exporter: PrometheusExporter) -> None:
    families = {f.name: f for f in text_string_to_metric_families(scrape(exporter))}
    declared = {prometheus_name(m) for kind in (TrainMetric, EvalMetric) for m in kind}
    assert set(families) == declared | set(TrainSeries)
    assert all(family.documentation for family in families.values())
    assert len(declared) == len(TrainMetric) + len(EvalMetric)


def test_silent_client_does_not_block_scrapes(exporter: PrometheusExporter) -> None:
    with socket.create_connection(("127.0.0.1", exporter.port)):
        assert "ludus_train_step" in scrape(exporter)


def test_closed_exporter_does_not_listen() -> None:
    sinks = open_sinks(run_config(prometheus={}), Path("unused"))
    (exporter,) = sinks
    assert isinstance(exporter, PrometheusExporter)
    scrape(exporter)
    sinks.close()
    with pytest.raises(urllib.error.URLError):
        scrape(exporter)


def test_resumed_run_continues_its_counters() -> None:
    earlier_rows = [row for step in (1, 2, 3) for row in step_rows(step)]
    sinks = open_sinks(
        run_config(prometheus={}), Path("unused"), resume_from=3, earlier_rows=earlier_rows
    )
    (exporter,) = sinks
    assert isinstance(exporter, PrometheusExporter)
    exporter.set_environment_options(OPTIONS)
    write(exporter, *step_rows(4))
    assert samples(exporter)[("ludus_train_wins_total", *BLACKJACK)] == 40
    sinks.close()


def test_occupied_port_is_refused_with_a_remedy() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.* or to 0 for any"):
            open_sinks(run_config(prometheus={"port": port}), Path("unused"))
