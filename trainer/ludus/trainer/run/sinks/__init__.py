"""Sinks: destinations of a run's metrics in addition to metrics.jsonl.

    MetricsWriter --MetricsRow--> Sinks --+-- PrometheusExporter  scraped over HTTP
                                          +-- TensorboardWriter   event files in the run's folder
                                          +-- WandbWriter         a service, or the run's folder
                                          +-- JobLog              standard output, in a cluster

A sink that cannot start as configured stops the run from starting. A sink that fails later gets no
more rows, with one warning. Training continues, because a sink only receives copies.
"""

from ludus.trainer.run.sinks.sinks import MetricsSink, Sinks, open_sinks

__all__ = ["MetricsSink", "Sinks", "open_sinks"]
