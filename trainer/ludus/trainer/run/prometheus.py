"""The sink for Prometheus, served over HTTP by the run's driver.

    training loop --write(row)--> series, behind a lock <--GET /metrics-- Prometheus
                                                           (a thread for each request)

Metrics that add up over rows are counters, all others are gauges. Every series has the label `run`,
the run's name. Metrics of one environment also have labels for its name and its opponent. Their sum
or mean over environments is the metric of the whole run. Counters start at zero, so that rates
include the first event. Counters of environments start when their servers have reported the
opponent. A gauge appears after its first measurement. After a resume, counters continue from the
earlier rows, but times start again.

Label values come from the configuration and from closed sets: environments, opponents, reward
terms, fixed policies, phases, and worker numbers. The content hash of a worker's weights is
therefore exported as a number: its first 48 bits, which are enough to distinguish two workers.

A rewind needs no action: later rows set the gauges, and counters include the repeated steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from socketserver import StreamRequestHandler
from typing import cast
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ludus.env.security.hosts import is_allowed_host, is_loopback_name, is_loopback_origin
from ludus.env.types import JsonObject
from ludus.proto.config import PrometheusSink, RecordedRun
from ludus.proto.errors import ConfigError
from ludus.proto.metrics import (
    REWARD_TERM_PREFIX,
    EvalMetric,
    Reduction,
    TrainMetric,
    TrainSeries,
    prometheus_name,
)
from ludus.proto.runs import MetricsRow, Phase, WorkerWeightsRow
from ludus.trainer.run.sinks import MetricsSink

_log = logging.getLogger(__name__)

TRAINED_POLICY = "trained"
"""Value of the label `policy` for the policy that the run trains."""
NO_OPPONENT = "environment"
"""Value of the label `opponent` if the environment's options name no opponent."""
_IDLE_TIMEOUT_S = 10.0
"""Time after which the server closes an idle connection, which would occupy a thread."""
_REFUSAL = (
    b"the metrics of this run are for programs of this machine, under the host names localhost, "
    b"127.0.0.1 and [::1]; set metrics.prometheus.host to listen on another address"
)
_HASH_DIGITS = 12
"""Number of exported hexadecimal digits of a content hash; a float64 represents them exactly."""
_ENVIRONMENT_LABELS = ("environment", "opponent")
_TRAIN_NAMES = {str(metric): prometheus_name(metric) for metric in TrainMetric}
_EVAL_NAMES = {str(metric): prometheus_name(metric) for metric in EvalMetric}


@dataclass(slots=True)
class Series:
    """The samples of one metric name, by their label values."""

    help_text: str
    labels: tuple[str, ...] = ()
    """Label names in addition to `run`."""
    is_counter: bool = False
    samples: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Samples by label values without `opponent`, which depends on the environment only."""

    def record(self, value: float, *label_values: str) -> None:
        """Add the value to a counter, or set a gauge to it."""
        previous_value = self.samples.get(label_values, 0.0) if self.is_counter else 0.0
        self.samples[label_values] = previous_value + value

    def make_family(self, name: str, run_name: str, opponents: Mapping[str, str]) -> Metric:
        """Return the samples for Prometheus, without environments whose opponent is unknown."""
        family_class = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        family = family_class(name, self.help_text, labels=("run", *self.labels))
        is_per_environment = self.labels[:2] == _ENVIRONMENT_LABELS
        for labels, value in self.samples.items():
            if not is_per_environment:
                family.add_metric((run_name, *labels), value)
            elif labels[0] in opponents:
                labels = (labels[0], opponents[labels[0]], *labels[1:])
                family.add_metric((run_name, *labels), value)
        return family


class RunSeries(MetricsSink, Collector):
    """The series of a run, updated from the rows of its metrics."""

    name = "prometheus"

    def __init__(self, run: RecordedRun, get_time_s: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._run_name = run.name
        self._get_time_s = get_time_s
        self._opponents: dict[str, str] = {}
        self._series = make_series()
        self._series[TrainSeries.RUN].record(1)
        self._series[TrainSeries.STEPS].record(0)
        self._series[TrainSeries.TARGET_STEPS].record(run.training.num_steps)
        for metric in TrainMetric:
            if metric.spec.reduction is Reduction.SUM:
                names = [(name,) for name in run.environments]
                for labels in names if metric.spec.is_per_environment else [()]:
                    self._series[_TRAIN_NAMES[metric]].record(0, *labels)
        self._record_phase(None)
        for series in (TrainSeries.LAST_STEP, TrainSeries.LAST_CHECKPOINT):
            self._series[series].record(get_time_s())

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Start exporting the series of the environments, with the opponents in these options."""
        with self._lock:
            self._opponents = {
                name: str(environment_options.get("opponent") or NO_OPPONENT)
                for name, environment_options in options.items()
            }

    def write(self, row: MetricsRow) -> None:
        """Update the series from a row."""
        with self._lock:
            self._series[TrainSeries.ELAPSED].record(row.elapsed_s)
            match row.kind:
                case "phase":
                    self._record_phase(row.phase, row.num_steps)
                case "train":
                    self._series[TrainSeries.STEP].record(row.step)
                    self._series[TrainSeries.STEPS].record(1)
                    self._series[TrainSeries.LAST_STEP].record(self._get_time_s())
                    self._series[TrainSeries.GAMES_TRAINED].record(row.num_games_trained)
                    self._record_run_metrics(row.values)
                case "environment":
                    self._record_environment_metrics(row.values, row.environment or "")
                case "eval" | "baseline":
                    labels = (row.environment or "", row.policy or TRAINED_POLICY)
                    for name, value in row.values.items():
                        self._series[_EVAL_NAMES[name]].record(value, *labels)
                case "weights":
                    self._record_run_metrics(row.values)
                    self._record_weights(row.weights)
                case "event" if row.environment is not None:
                    self._record_environment_metrics(row.values, row.environment)
                case "event":
                    self._record_run_metrics(row.values)
                    if TrainMetric.NUM_CHECKPOINTS in row.values:
                        self._series[TrainSeries.LAST_CHECKPOINT].record(self._get_time_s())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by prometheus_client."""
        with self._lock:
            families = [
                series.make_family(name, self._run_name, self._opponents)
                for name, series in self._series.items()
            ]
        yield from families

    def _record_run_metrics(self, values: Mapping[str, float]) -> None:
        for metric in TrainMetric:
            # Metrics of environments have separate rows.
            if not metric.spec.is_per_environment and metric in values:
                self._series[_TRAIN_NAMES[metric]].record(values[metric])

    def _record_environment_metrics(self, values: Mapping[str, float], environment: str) -> None:
        for name, value in values.items():
            if name.startswith(REWARD_TERM_PREFIX):
                term = name.removeprefix(REWARD_TERM_PREFIX)
                self._series[TrainSeries.REWARD_TERM].record(value, environment, term)
            else:
                self._series[_TRAIN_NAMES[name]].record(value, environment)

    def _record_phase(self, current_phase: Phase | None, num_steps: int | None = None) -> None:
        if num_steps is not None:
            self._series[TrainSeries.TARGET_STEPS].record(num_steps)
        for phase in Phase:
            self._series[TrainSeries.PHASE].record(phase is current_phase, phase)
        self._series[TrainSeries.PHASE_START].record(self._get_time_s())

    def _record_weights(self, weights: tuple[WorkerWeightsRow, ...]) -> None:
        value_readers = {
            TrainSeries.WORKER_VERSION: lambda worker: worker.version,
            TrainSeries.WORKER_HASH: lambda worker: int(worker.content_hash[:_HASH_DIGITS], 16),
            TrainSeries.WORKER_CANARY_ERROR: lambda worker: worker.canary_error,
        }
        self._series[TrainSeries.WORKERS].record(len(weights))
        for name, read_value in value_readers.items():
            # Workers that no longer exist are removed.
            self._series[name].samples.clear()
            for worker in weights:
                self._series[name].record(read_value(worker), str(worker.worker))


class PrometheusExporter(RunSeries):
    """An exporter that serves the series of a run over HTTP until it is closed."""

    def __init__(self, run: RecordedRun, config: PrometheusSink) -> None:
        """Start the server."""
        super().__init__(run)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics.prometheus cannot listen on {config.host}:{config.port}: "
                f"{error.strerror or error}; set metrics.prometheus.port to a free port, or to 0 "
                "for any"
            ) from error
        if is_loopback_name(str(self._server.server_address[0])):
            metrics_app = cast(WSGIApplication, self._server.get_app())
            self._server.set_app(_refuse_foreign_pages(metrics_app))
        handler = cast(type[StreamRequestHandler], self._server.RequestHandlerClass)
        handler.timeout = _IDLE_TIMEOUT_S
        _log.info("metrics for Prometheus on http://%s:%d/metrics", config.host, self.port)

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._server.server_port

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _refuse_foreign_pages(app: WSGIApplication) -> WSGIApplication:
    """Return an application that refuses requests with hosts or origins of other machines."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        has_local_host = is_allowed_host(environ.get("HTTP_HOST", "localhost"), ())
        if has_local_host and is_loopback_origin(environ.get("HTTP_ORIGIN", "http://localhost")):
            return app(environ, start_response)
        start_response("403 Forbidden", [("content-type", "text/plain; charset=utf-8")])
        return [_REFUSAL]

    return answer


def make_series() -> dict[str, Series]:
    """Return all series that a run exports, by name and without samples."""
    labels = ("worker",)
    series = {
        _TRAIN_NAMES[metric]: Series(
            metric.spec.help,
            _ENVIRONMENT_LABELS if metric.spec.is_per_environment else (),
            metric.spec.reduction is Reduction.SUM,
        )
        for metric in TrainMetric
    }
    series |= {
        _EVAL_NAMES[metric]: Series(metric.spec.help, (*_ENVIRONMENT_LABELS, "policy"))
        for metric in EvalMetric
    }
    return series | {
        TrainSeries.RUN: Series("1 while the run exists."),
        TrainSeries.PHASE: Series("1 for the current phase, 0 for all others.", ("phase",)),
        TrainSeries.PHASE_START: Series("Unix time at which the current phase started."),
        TrainSeries.STEP: Series("Training steps done."),
        TrainSeries.STEPS: Series(
            "Training steps done, including steps that a restart rolled back.", is_counter=True
        ),
        TrainSeries.TARGET_STEPS: Series("Training steps of the whole run."),
        TrainSeries.LAST_STEP: Series(
            "Unix time at which the newest step ended; before the first step, the run's start."
        ),
        TrainSeries.LAST_CHECKPOINT: Series(
            "Unix time of the latest checkpoint; before the first checkpoint, the run's start."
        ),
        TrainSeries.ELAPSED: Series("Seconds of training so far."),
        TrainSeries.GAMES_TRAINED: Series("Episodes trained on so far."),
        TrainSeries.REWARD_TERM: Series(
            "Mean reward term of an episode, before it is weighted.", (*_ENVIRONMENT_LABELS, "term")
        ),
        TrainSeries.WORKERS: Series("Rollout workers that have loaded weights."),
        TrainSeries.WORKER_VERSION: Series("Weights version that a worker has loaded.", labels),
        TrainSeries.WORKER_HASH: Series(
            "First 48 bits of the content hash of a worker's weights.", labels
        ),
        TrainSeries.WORKER_CANARY_ERROR: Series(
            "Canary error of a worker's newest weights, in nats.", labels
        ),
    }
