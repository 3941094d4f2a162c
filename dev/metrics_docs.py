"""Write docs/metrics.md from the descriptions of the metrics, or check it."""

from __future__ import annotations

from collections.abc import Iterator

from generated_page import write_or_check_page

from ludus.proto.metrics import (
    EvalMetric,
    MetricSpec,
    Reduction,
    TrainMetric,
    TrainSeries,
    prometheus_name,
)
from ludus.trainer.run.prometheus import make_series

INTRODUCTION = """# Metrics of a run

`metrics.jsonl` in the run folder contains all metrics, one row per line. `kind` is the kind of the
row:

| kind | environment | values |
|---|---|---|
| `phase` | | none; `phase` is the new phase of the run |
| `train` | | a training step of the whole run |
| `environment` | name | a training step of one environment |
| `eval` | name | an evaluation of the trained policy, on seeds that training never uses |
| `baseline` | name | the fixed policy `policy`, on the same seeds |
| `weights` | | a delivery; `weights` has version, content hash and canary error of every worker |
| `event` | name, or none | an event: a failed canary check, a restart, a checkpoint, a \
validation of a [fine-tuning run](sft.md), or an environment that the curriculum opened |

Section `metrics` of the [configuration](configuration.md) sends the same rows to other sinks:

- `metrics.tensorboard = true`: event files in `runs/NAME/tensorboard/`, as `train/loss`,
  `train/ENVIRONMENT/win_rate`, `eval/ENVIRONMENT/win_rate`, `eval/ENVIRONMENT/POLICY/win_rate`.
- `[metrics.wandb]`: Weights & Biases, under the same names, over `step`. With
  `mode = "offline"`, the files are in `runs/NAME/wandb/`; send them with `wandb sync`. The key
  comes from `WANDB_API_KEY`.
- `[metrics.prometheus]`: `http://HOST:PORT/metrics`, served by the run's driver under the names
  below. trainer.log reports the port. [dashboards.md](dashboards.md) describes the Grafana
  dashboards.

A run does not start if one of its sinks cannot start. If a sink fails later, it gets no further
rows, trainer.log reports it once, and training continues. All sinks continue when a run resumes.

The **reduction** combines the values of environments and steps. A mean is weighted by the metric
after "by". In Prometheus, a sum over training steps is a counter with the suffix `_total`, and
everything else is a gauge. Each series has the label `run`, the name of the run. Metrics per
environment (*) have the labels `environment` and `opponent`. `opponent` is the environment's option
of that name, or `environment` if there is no such option. Evaluation metrics have the label
`policy`: `trained`, or the name of a fixed policy.

MFU is relative to a matrix product with the same number of threads on a CPU, and to the data sheet
on a GPU. It does not count padding, repeated computation, or tokens that sequences share.

This page is generated: `.venv/bin/python dev/metrics_docs.py`.
"""
REWARD_TERMS = """
`reward_term.NAME`* is the mean of a reward term over episodes with a reward, without its weight. In
Prometheus, it is `ludus_train_reward_term_mean` with the label `term`.
"""


def make_page() -> str:
    """Return the text of the page."""
    return "".join(
        [
            INTRODUCTION,
            *_make_table("Training steps", TrainMetric),
            REWARD_TERMS,
            *_make_table("Evaluations", EvalMetric),
            *_make_series(),
        ]
    )


def _make_table(title: str, metrics: type[TrainMetric] | type[EvalMetric]) -> Iterator[str]:
    yield f"\n## {title}\n\n| metric | unit | reduction | description | Prometheus |\n"
    yield "|---|---|---|---|---|\n"
    for metric in metrics:
        spec = metric.spec
        mark = "*" if spec.is_per_environment else ""
        suffix = "_total" if spec.reduction is Reduction.SUM and metrics is TrainMetric else ""
        yield (
            f"| `{metric}`{mark} | {spec.unit} | {_describe_reduction(spec)} | {spec.help} "
            f"| `{prometheus_name(metric)}{suffix}` |\n"
        )


def _describe_reduction(spec: MetricSpec) -> str:
    weight = f" by `{spec.weight}`" if spec.weight else ""
    return f"{spec.reduction}{weight}"


def _make_series() -> Iterator[str]:
    yield "\n## Only in Prometheus\n\n| series | labels | description |\n|---|---|---|\n"
    series = make_series()
    for name in TrainSeries:
        labels = ", ".join(series[name].labels)
        suffix = "_total" if series[name].is_counter else ""
        yield f"| `{name}{suffix}` | {labels} | {series[name].help_text} |\n"


if __name__ == "__main__":
    write_or_check_page("metrics.md", make_page())
