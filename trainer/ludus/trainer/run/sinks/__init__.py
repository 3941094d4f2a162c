"""Where the rows of a run go beside metrics.jsonl.

    RunFolder --MetricsRow--> Sinks --+-- PrometheusExporter  scraped over HTTP
                                      +-- TensorboardWriter   event files in the run's folder
                                      +-- WandbWriter         a service, or the run's folder
                                      +-- JobLog              standard output, in a cluster

A sink that cannot start as configured refuses the run. One that fails later is left out from
then on, with one warning: what it shows is a copy, and no reason to end a training.
"""

from ludus.trainer.run.sinks.sinks import MetricsSink, Sinks, open_sinks

__all__ = ["MetricsSink", "Sinks", "open_sinks"]
