"""Metrics for Prometheus, served by the run's driver.

    training loop --write(row)--> series, behind a lock <--GET /metrics-- Prometheus
                                                           (a thread for each request)

What rows add up is a counter here, everything else a gauge. Every series has the label `run`, the
run's name. Metrics that every environment has of its own are labelled with its name and its
opponent, too; summed or averaged they are those of the whole run. Counters exist from the start,
at zero, so that rates never miss a beginning; those of environments once their servers have said
whom the policy plays against. A gauge exists once it was measured. A run that is resumed counts
on. Times are those of this process: what a run did before it was resumed does not count.

Label values come from the configuration and from closed sets: environments, opponents, reward
terms, fixed policies, phases, numbers of workers. The content hash of the weights that a worker
holds is therefore a number: its first 48 bits, enough to see that two workers differ.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ludus.env.types import JsonObject
from ludus.proto.config import PrometheusSink, RunConfig
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

_log = logging.getLogger(__name__)

TRAINED_POLICY = "trained"
"""Value of the label `policy` for the policy that the run trains."""
NO_OPPONENT = "environment"
"""Value of the label `opponent` where the environment's options name none."""
_REQUEST_TIMEOUT_S = 10.0
_HASH_DIGITS = 12
"""Hexadecimal digits of a content hash that a float64 holds exactly: 48 bits."""
_OF_ENVIRONMENT = ("environment", "opponent")
_TRAIN_NAMES = {str(metric): prometheus_name(metric) for metric in TrainMetric}
_EVAL_NAMES = {str(metric): prometheus_name(metric) for metric in EvalMetric}


@dataclass(slots=True)
class Series:
    """The samples of one name, by the values of its labels."""

    text: str
    labels: tuple[str, ...] = ()
    """Beside `run`."""
    is_counter: bool = False
    samples: dict[tuple[str, ...], float] = field(default_factory=dict)
    """By the values of `labels`, without that of `opponent`, which follows from environment."""

    def take(self, value: float, *labels: str) -> None:
        """Add the value to a counter; set a gauge to it."""
        before = self.samples.get(labels, 0.0) if self.is_counter else 0.0
        self.samples[labels] = before + value

    def family(self, name: str, run: str, opponents: Mapping[str, str]) -> Metric:
        """What a scrape shows; environments whose opponent is not known are not shown yet."""
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        family = kind(name, self.text, labels=("run", *self.labels))
        is_per_environment = self.labels[:2] == _OF_ENVIRONMENT
        for labels, value in self.samples.items():
            if not is_per_environment:
                family.add_metric((run, *labels), value)
            elif labels[0] in opponents:
                environment, *rest = labels
                family.add_metric((run, environment, opponents[environment], *rest), value)
        return family


class RunSeries:
    """A run as Prometheus sees it, from the rows of its metrics.

    Args:
        now: Unix time in seconds.
    """

    def __init__(self, run: RunConfig, now: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._run = run.name
        self._now = now
        self._opponents: dict[str, str] = {}
        self._series = declared_series()
        self._series[TrainSeries.RUN].take(1)
        self._series[TrainSeries.STEPS].take(0)
        self._series[TrainSeries.TARGET_STEPS].take(run.training.num_steps)
        for metric in TrainMetric:
            if metric.spec.reduction is Reduction.SUM:
                names = [(name,) for name in run.environments]
                for labels in names if metric.spec.is_per_environment else [()]:
                    self._series[_TRAIN_NAMES[metric]].take(0, *labels)
        self._show_phase(None)
        for series in (TrainSeries.LAST_STEP, TrainSeries.LAST_CHECKPOINT):
            self._series[series].take(now())

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Show the series of the environments, which were built with these options."""
        with self._lock:
            self._opponents = {name: opponent_of(built) for name, built in options.items()}

    def write(self, row: MetricsRow) -> None:
        """Show the row in the next scrape."""
        with self._lock:
            self._series[TrainSeries.ELAPSED].take(row.elapsed_s)
            match row.kind:
                case "phase":
                    self._show_phase(row.phase, row.num_steps)
                case "train":
                    self._series[TrainSeries.STEP].take(row.step)
                    self._series[TrainSeries.STEPS].take(1)
                    self._series[TrainSeries.LAST_STEP].take(self._now())
                    self._series[TrainSeries.GAMES_TRAINED].take(row.num_games_trained)
                    self._take_run(row.values)
                case "environment":
                    self._take_environment(row.values, row.environment or "")
                case "eval" | "baseline":
                    labels = (row.environment or "", row.policy or TRAINED_POLICY)
                    for name, value in row.values.items():
                        self._series[_EVAL_NAMES[name]].take(value, *labels)
                case "weights":
                    self._take_run(row.values)
                    self._show_weights(row.weights)
                case "event" if row.environment is not None:
                    self._take_environment(row.values, row.environment)
                case "event":
                    self._take_run(row.values)
                    if TrainMetric.NUM_CHECKPOINTS in row.values:
                        self._series[TrainSeries.LAST_CHECKPOINT].take(self._now())

    def collect(self) -> Iterator[Metric]:
        """Every family; called by prometheus_client."""
        with self._lock:
            families = [
                series.family(name, self._run, self._opponents)
                for name, series in self._series.items()
            ]
        yield from families

    def _take_run(self, values: Mapping[str, float]) -> None:
        for metric in TrainMetric:
            # Those of environments come in rows of their own.
            if not metric.spec.is_per_environment and metric in values:
                self._series[_TRAIN_NAMES[metric]].take(values[metric])

    def _take_environment(self, values: Mapping[str, float], environment: str) -> None:
        for name, value in values.items():
            if name.startswith(REWARD_TERM_PREFIX):
                term = name.removeprefix(REWARD_TERM_PREFIX)
                self._series[TrainSeries.REWARD_TERM].take(value, environment, term)
            else:
                self._series[_TRAIN_NAMES[name]].take(value, environment)

    def _show_phase(self, current: Phase | None, num_steps: int | None = None) -> None:
        if num_steps is not None:
            self._series[TrainSeries.TARGET_STEPS].take(num_steps)
        for phase in Phase:
            self._series[TrainSeries.PHASE].take(phase is current, phase)
        self._series[TrainSeries.PHASE_START].take(self._now())

    def _show_weights(self, held: tuple[WorkerWeightsRow, ...]) -> None:
        by_worker = {
            TrainSeries.WORKER_VERSION: lambda worker: worker.version,
            TrainSeries.WORKER_HASH: lambda worker: int(worker.content_hash[:_HASH_DIGITS], 16),
            TrainSeries.WORKER_CANARY_ERROR: lambda worker: worker.canary_error,
        }
        self._series[TrainSeries.WORKERS].take(len(held))
        for name, read in by_worker.items():
            # Workers that left are shown no more.
            self._series[name].samples.clear()
            for worker in held:
                self._series[name].take(read(worker), str(worker.worker))


class PrometheusExporter:
    """Serves a run's series until it is closed."""

    name = "prometheus"

    def __init__(self, run: RunConfig, config: PrometheusSink) -> None:
        """Raises: ConfigError: the address cannot be listened on."""
        self._series = RunSeries(run)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._series)
        try:
            self._server = make_server(
                config.host, config.port, make_wsgi_app(registry), _Server, _Request
            )
        except OSError as error:
            raise ConfigError(
                f"metrics.prometheus cannot listen on {config.host}:{config.port}: "
                f"{error.strerror or error}; set metrics.prometheus.port to a free port, or to 0 "
                "for any"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus")
        self._thread.daemon = True
        self._thread.start()
        _log.info("metrics for Prometheus on http://%s:%d/metrics", config.host, self.port)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_port

    def write(self, row: MetricsRow) -> None:
        """Show the row in the next scrape."""
        self._series.write(row)

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Show the series of the environments, which were built with these options."""
        self._series.set_environment_options(options)

    def rewind(self, step: int) -> None:
        """Do nothing: gauges follow the next rows; counters count what was done all the same."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def opponent_of(options: JsonObject) -> str:
    """Who the policy plays against, as the environment's options name it."""
    opponent = options.get("opponent")
    return opponent if isinstance(opponent, str) else NO_OPPONENT


def declared_series() -> dict[str, Series]:
    """Every series that a run exports, by its name, still empty."""
    worker = ("worker",)
    series = {
        _TRAIN_NAMES[metric]: Series(
            metric.spec.help,
            _OF_ENVIRONMENT if metric.spec.is_per_environment else (),
            metric.spec.reduction is Reduction.SUM,
        )
        for metric in TrainMetric
    }
    series |= {
        _EVAL_NAMES[metric]: Series(metric.spec.help, (*_OF_ENVIRONMENT, "policy"))
        for metric in EvalMetric
    }
    return series | {
        TrainSeries.RUN: Series("1 while the run of that name is there."),
        TrainSeries.PHASE: Series("1 for what the run is doing, 0 for all else.", ("phase",)),
        TrainSeries.PHASE_START: Series("Unix time at which the run turned to it."),
        TrainSeries.STEP: Series("Optimizer batches done."),
        TrainSeries.STEPS: Series(
            "Optimizer batches taken, those that a restart rolled back included.", is_counter=True
        ),
        TrainSeries.TARGET_STEPS: Series("Optimizer batches of the whole run."),
        TrainSeries.LAST_STEP: Series(
            "Unix time of the newest step's end; before it, of the run's start."
        ),
        TrainSeries.LAST_CHECKPOINT: Series(
            "Unix time of the newest checkpoint; before it, of the run's start."
        ),
        TrainSeries.ELAPSED: Series("Seconds of training so far."),
        TrainSeries.GAMES_TRAINED: Series("Episodes whose gradients were taken so far."),
        TrainSeries.REWARD_TERM: Series(
            "Reward term of an episode, before its weight.", (*_OF_ENVIRONMENT, "term")
        ),
        TrainSeries.WORKERS: Series("Rollout workers that hold weights."),
        TrainSeries.WORKER_VERSION: Series("Version of the weights that a worker holds.", worker),
        TrainSeries.WORKER_HASH: Series(
            "First 48 bits of their content hash: equal where workers hold the same.", worker
        ),
        TrainSeries.WORKER_CANARY_ERROR: Series(
            "Error of a worker's newest canary, in nats.", worker
        ),
    }


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Request(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S
    """For a peer that says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every few seconds is no news."""
