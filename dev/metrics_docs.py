"""Writes docs/metrics.md from the metrics' own descriptions, or checks it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from ludus.proto.metrics import (
    EvalMetric,
    MetricSpec,
    Reduction,
    TrainMetric,
    TrainSeries,
    prometheus_name,
)
from ludus.trainer.run.sinks.prometheus import declared_series

TARGET = Path(__file__).parent.parent / "docs" / "metrics.md"
INTRODUCTION = """# Metrics of a run

`metrics.jsonl` in the run's folder holds them all, one row a line. `kind` says what a row is:

| kind | environment | values |
|---|---|---|
| `phase` | | none; `phase` says what the run turns to |
| `train` | | a training step, the whole run |
| `environment` | its name | a training step, as far as each environment has its own |
| `eval` | its name | the trained policy, judged on seeds that training never sees |
| `baseline` | its name | the fixed policy `policy`, on the same seeds |
| `weights` | | a delivery; `weights` names version, content hash and canary of every worker |
| `event` | its name, or none | counts what happened just now: a failed canary, a restart, \
a checkpoint, an environment that the curriculum opened |

The same rows go to other places when section `metrics` of the
[configuration](configuration.md) says so:

- `metrics.tensorboard = true`: event files in `runs/NAME/tensorboard/`, as `train/loss`,
  `train/ENVIRONMENT/win_rate`, `eval/ENVIRONMENT/win_rate`, `eval/ENVIRONMENT/POLICY/win_rate`.
- `[metrics.wandb]`: Weights & Biases under the same names, over `step`; with `mode = "offline"`
  in `runs/NAME/wandb/`, to be sent later with `wandb sync`. The key comes from `WANDB_API_KEY`.
- `[metrics.prometheus]`: `http://HOST:PORT/metrics`, served by the run's driver under the names
  below; trainer.log names the port. [dashboards.md](dashboards.md) shows them in Grafana.

A sink that cannot start as configured refuses the run. One that fails later gets no more rows,
trainer.log says so once, and training continues. Each sink continues when a run is resumed.

**Reduction** says how values of environments and of steps become those of the whole: a mean is
weighted by the metric that is named, so averages of averages do not occur. On Prometheus a sum
over training steps is a counter that ends in `_total`, everything else a gauge. Each series has
the label `run`, the run's name. Metrics that each environment has of its own (*) have the labels
`environment` and `opponent` there: the option `opponent` that the environment's server says it
was built with, or `environment` where it names none. Metrics of evaluations have the label
`policy` too: `trained`, or the name of a fixed policy.

The MFU of a CPU is measured against a matrix product with the same number of threads, that of a
GPU against its data sheet; it counts neither padding, nor what sequences share, nor what is
computed twice.

This page is generated: `.venv/bin/python dev/metrics_docs.py`.
"""
REWARD_TERMS = """
`reward_term.NAME`* is the mean of a reward term over scored episodes, before its weight;
on Prometheus `ludus_train_reward_term_mean` with the label `term`.
"""


def page() -> str:
    """The whole page."""
    return "".join(
        [
            INTRODUCTION,
            *_table("Training steps", TrainMetric),
            REWARD_TERMS,
            *_table("Evaluations", EvalMetric),
            *_series(),
        ]
    )


def _table(title: str, metrics: type[TrainMetric] | type[EvalMetric]) -> Iterator[str]:
    yield f"\n## {title}\n\n| metric | unit | reduction | | Prometheus |\n|---|---|---|---|---|\n"
    for metric in metrics:
        spec = metric.spec
        star = "*" if spec.is_per_environment else ""
        total = "_total" if spec.reduction is Reduction.SUM and metrics is TrainMetric else ""
        yield (
            f"| `{metric}`{star} | {spec.unit} | {_reduction(spec)} | {spec.help} "
            f"| `{prometheus_name(metric)}{total}` |\n"
        )


def _reduction(spec: MetricSpec) -> str:
    by = f" by `{spec.weight}`" if spec.weight else ""
    return f"{spec.reduction}{by}"


def _series() -> Iterator[str]:
    yield "\n## On Prometheus only\n\n| series | labels | |\n|---|---|---|\n"
    series = declared_series()
    for name in TrainSeries:
        labels = ", ".join(series[name].labels)
        total = "_total" if series[name].is_counter else ""
        yield f"| `{name}{total}` | {labels} | {series[name].text} |\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    if not parser.parse_args().check:
        TARGET.write_text(page(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != page():
        sys.exit("docs/metrics.md is stale; run dev/metrics_docs.py")
