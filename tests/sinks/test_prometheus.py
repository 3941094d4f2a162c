"""Tests of the Prometheus exporter of a run."""

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
from tests.sinks.mixed_run import (
    make_eval_rows,
    make_event_row,
    make_phase_row,
    make_run_config,
    make_step_rows,
    make_weights_row,
)

pytestmark = pytest.mark.slow

BLACKJACK_LABELS = ("environment=blackjack", "opponent=environment")
TIC_TAC_TOE_LABELS = ("environment=tic_tac_toe", "opponent=first")
OPTIONS_BY_ENVIRONMENT = {"blackjack": {"game": "blackjack"}, "tic_tac_toe": {"opponent": "first"}}


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    run = make_run_config(prometheus={})
    assert run.metrics.prometheus is not None
    exporter = PrometheusExporter(run, run.metrics.prometheus)
    exporter.set_environment_options(OPTIONS_BY_ENVIRONMENT)
    yield exporter
    exporter.close()


def scrape(exporter: PrometheusExporter) -> str:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{exporter.port}/metrics", timeout=60
    ) as response:
        return response.read().decode()


def read_samples(exporter: PrometheusExporter) -> dict[tuple[str, ...], float]:
    """Scrape the exporter; return each value by its name and labels, except the label `run`."""
    values = {}
    for family in text_string_to_metric_families(scrape(exporter)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "mixed"
            key = (sample.name, *(f"{label}={value}" for label, value in labels.items()))
            values[key] = sample.value
    return values


def write_rows(exporter: PrometheusExporter, *rows: MetricsRow) -> None:
    for row in rows:
        exporter.write(row)


def test_counters_start_at_zero_and_unmeasured_gauges_are_absent(
    exporter: PrometheusExporter,
) -> None:
    initial_samples = read_samples(exporter)
    for metric in TrainMetric:
        name = prometheus_name(metric)
        is_counter = metric.spec.reduction is Reduction.SUM
        label_sets = (
            (BLACKJACK_LABELS, TIC_TAC_TOE_LABELS) if metric.spec.is_per_environment else ((),)
        )
        for labels in label_sets:
            assert initial_samples.get((f"{name}_total", *labels)) == (0 if is_counter else None)
            assert (name, *labels) not in initial_samples
    assert initial_samples[TrainSeries.RUN,] == 1


def test_counters_accumulate_and_gauges_show_the_latest_value(exporter: PrometheusExporter) -> None:
    write_rows(exporter, *make_step_rows(1), *make_step_rows(2), *make_eval_rows(2, 0.4))
    values = read_samples(exporter)
    expected_values = {
        ("ludus_train_wins_total", *BLACKJACK_LABELS): 20,
        ("ludus_train_draws_total", *BLACKJACK_LABELS): 10,
        ("ludus_train_losses_total", *BLACKJACK_LABELS): 50,
        ("ludus_train_wins_total", *TIC_TAC_TOE_LABELS): 120,
        ("ludus_train_episodes_total", *TIC_TAC_TOE_LABELS): 120,
        ("ludus_train_tokens_generated_total", *BLACKJACK_LABELS): 560,
        ("ludus_train_win_rate", *BLACKJACK_LABELS): 0.25,
        ("ludus_train_reward_term_mean", *TIC_TAC_TOE_LABELS, "term=format"): 0.5,
        ("ludus_train_tokens_trained_total",): 2000,
        ("ludus_train_train_seconds_total",): 1.0,
        ("ludus_train_loss",): 0.5,
        ("ludus_train_step",): 2,
        ("ludus_train_steps_total",): 2,
        ("ludus_train_games_trained",): 200,
        ("ludus_train_eval_win_rate", *BLACKJACK_LABELS, "policy=trained"): 0.4,
        ("ludus_train_eval_win_rate", *BLACKJACK_LABELS, "policy=random"): 0.28,
    }
    assert {key: values.get(key) for key in expected_values} == expected_values
    # Metrics per environment have no series for the whole run.
    assert ("ludus_train_episodes_total",) not in values


def test_unlocked_environment_is_counted(
    exporter: PrometheusExporter,
) -> None:
    write_rows(exporter, make_event_row(TrainMetric.NUM_UNLOCKS, "tic_tac_toe"))
    values = read_samples(exporter)
    assert values["ludus_train_unlocks_total", *TIC_TAC_TOE_LABELS] == 1
    assert values["ludus_train_unlocks_total", *BLACKJACK_LABELS] == 0


def test_exactly_one_phase_is_active(exporter: PrometheusExporter) -> None:
    for active_phase in (Phase.START_WORKERS, Phase.TRAIN, Phase.EVALUATE):
        write_rows(exporter, make_phase_row(active_phase))
        values = read_samples(exporter)
        phase_values = {name: values["ludus_train_phase", f"phase={name}"] for name in Phase}
        assert phase_values == {name: float(name is active_phase) for name in Phase}


def test_weight_series_of_removed_workers_disappear(exporter: PrometheusExporter) -> None:
    write_rows(exporter, make_weights_row(3, {0: "00000000000a" + "f" * 50, 1: "00000000000b"}))
    values = read_samples(exporter)
    assert values["ludus_train_worker_weights_version", "worker=1"] == 3
    assert values["ludus_train_worker_weights_hash", "worker=0"] == 10
    assert values["ludus_train_worker_weights_hash", "worker=1"] == 11
    assert values["ludus_train_sampler_pause_seconds_total",] == 0.25
    write_rows(exporter, make_weights_row(4, {1: "ffffffffffff"}))
    values = read_samples(exporter)
    assert values["ludus_train_workers",] == 1
    assert values["ludus_train_worker_weights_hash", "worker=1"] == 2**48 - 1
    assert ("ludus_train_worker_weights_version", "worker=0") not in values


def test_environment_series_are_absent_until_options_are_set() -> None:
    run = make_run_config(prometheus={})
    assert run.metrics.prometheus is not None
    exporter = PrometheusExporter(run, run.metrics.prometheus)
    try:
        write_rows(exporter, *make_step_rows(1))
        assert not [key for key in read_samples(exporter) if "wins" in key[0]]
        exporter.set_environment_options(OPTIONS_BY_ENVIRONMENT)
        assert read_samples(exporter)["ludus_train_wins_total", *TIC_TAC_TOE_LABELS] == 60
    finally:
        exporter.close()


def test_latest_phase_step_and_checkpoint_times_are_exported() -> None:
    now_s = 1000.0
    series = RunSeries(make_run_config(), lambda: now_s)

    def collect_times() -> list[float]:
        families = {family.name: family for family in series.collect()}
        names = (TrainSeries.PHASE_START, TrainSeries.LAST_STEP, TrainSeries.LAST_CHECKPOINT)
        return [families[name].samples[0].value for name in names]

    assert collect_times() == [1000, 1000, 1000]
    now_s = 1001
    series.write(make_phase_row(Phase.TRAIN))
    assert collect_times() == [1001, 1000, 1000]
    now_s = 1002
    series.write(make_step_rows(1)[0])
    assert collect_times() == [1001, 1002, 1000]
    now_s = 1003
    series.write(make_event_row(TrainMetric.NUM_CANARY_FAILURES))
    assert collect_times() == [1001, 1002, 1000]
    series.write(make_event_row(TrainMetric.NUM_CHECKPOINTS))
    assert collect_times() == [1001, 1002, 1003]


def test_failed_canary_is_counted(exporter: PrometheusExporter) -> None:
    assert read_samples(exporter)["ludus_train_canary_failures_total",] == 0
    write_rows(exporter, make_event_row(TrainMetric.NUM_CANARY_FAILURES))
    assert read_samples(exporter)["ludus_train_canary_failures_total",] == 1


def test_concurrent_scrapes_are_consistent(
    exporter: PrometheusExporter,
) -> None:
    num_steps = 300
    finished_event = threading.Event()

    def write_training_rows() -> None:
        for step in range(1, num_steps + 1):
            write_rows(exporter, *make_step_rows(step), make_phase_row(Phase.TRAIN, step))
        finished_event.set()

    writer_thread = threading.Thread(target=write_training_rows)
    writer_thread.start()
    win_counts: list[float] = []
    while not finished_event.is_set() or not win_counts:
        values = read_samples(exporter)
        assert sum(values["ludus_train_phase", f"phase={name}"] for name in Phase) <= 1
        win_counts.append(values[("ludus_train_wins_total", *BLACKJACK_LABELS)])
    writer_thread.join()
    assert win_counts == sorted(win_counts)
    assert read_samples(exporter)[("ludus_train_wins_total", *BLACKJACK_LABELS)] == 10 * num_steps


def test_every_series_is_declared_and_has_a_help_text(exporter: PrometheusExporter) -> None:
    families = {family.name: family for family in text_string_to_metric_families(scrape(exporter))}
    declared_names = {
        prometheus_name(metric)
        for metric_type in (TrainMetric, EvalMetric)
        for metric in metric_type
    }
    assert set(families) == declared_names | set(TrainSeries)
    assert all(family.documentation for family in families.values())
    assert len(declared_names) == len(TrainMetric) + len(EvalMetric)


def test_silent_client_does_not_block_scrapes(exporter: PrometheusExporter) -> None:
    with socket.create_connection(("127.0.0.1", exporter.port)):
        assert "ludus_train_step" in scrape(exporter)


def test_closed_exporter_refuses_connections() -> None:
    sinks = open_sinks(make_run_config(prometheus={}), Path("unused"))
    (exporter,) = sinks
    assert isinstance(exporter, PrometheusExporter)
    scrape(exporter)
    sinks.close()
    with pytest.raises(urllib.error.URLError):
        scrape(exporter)


def test_counters_continue_after_resume() -> None:
    earlier_rows = [row for step in (1, 2, 3) for row in make_step_rows(step)]
    sinks = open_sinks(
        make_run_config(prometheus={}), Path("unused"), resume_from=3, earlier_rows=earlier_rows
    )
    (exporter,) = sinks
    assert isinstance(exporter, PrometheusExporter)
    exporter.set_environment_options(OPTIONS_BY_ENVIRONMENT)
    write_rows(exporter, *make_step_rows(4))
    assert read_samples(exporter)[("ludus_train_wins_total", *BLACKJACK_LABELS)] == 40
    sinks.close()


def test_port_in_use_is_refused_with_a_remedy() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.* or to 0 for any"):
            open_sinks(make_run_config(prometheus={"port": port}), Path("unused"))


@pytest.mark.parametrize("header", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_foreign_web_page_is_refused(exporter: PrometheusExporter, header: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    request = urllib.request.Request(url, headers=header)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=60)
