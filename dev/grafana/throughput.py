"""Dashboard of weight synchronization and throughput: canary, tokens, idle time, buffer."""

from __future__ import annotations

from grafana import variables
from grafana.model import Annotation, Dashboard, Panel, Query, Row
from grafana.queries import OF_RUN, PLAYED, RUN, gauge, increase, per_step, rate
from ludus.proto.metrics import TrainMetric, TrainSeries

_BY_WORKER = f"{RUN}, worker"
_RUN = "{{run}}"


def _by_worker(series: TrainSeries) -> str:
    return f"max by ({_BY_WORKER}) ({series}{{{OF_RUN}}})"


_WEIGHTS = Row(
    "Weights",
    (
        Panel(
            "Versions behind the learner",
            "Number of versions by which each rollout worker is behind the learner.",
            (
                Query(
                    f"{gauge(TrainSeries.STEP)}\n"
                    f"  - on ({RUN}) group_right () {_by_worker(TrainSeries.WORKER_VERSION)}",
                    "{{run}}: worker {{worker}}",
                ),
            ),
            "suffix: versions",
            min=0,
            decimals=0,
        ),
        Panel(
            "Weight sync duration",
            "Time per step from the last update until every worker samples from it. Publishing "
            "blocks the learner; delivery overlaps with the next step.",
            (
                Query(per_step(TrainMetric.PUBLISH_S), "{{run}}: publish"),
                Query(per_step(TrainMetric.DELIVER_S), "{{run}}: deliver"),
                Query(per_step(TrainMetric.WEIGHT_FETCH_S), "{{run}}: fetch, slowest worker"),
                Query(per_step(TrainMetric.SAMPLER_PAUSE_S), "{{run}}: sampling paused"),
            ),
            "s",
            min=0,
        ),
        Panel(
            "Weight sync bytes",
            "Bytes of a published version, and bytes that all workers fetched for it.",
            (
                Query(per_step(TrainMetric.WEIGHT_SYNC_BYTES), "{{run}}: published"),
                Query(per_step(TrainMetric.WEIGHT_FETCH_BYTES), "{{run}}: fetched"),
            ),
            "bytes",
            min=0,
        ),
        Panel(
            "Canary error",
            "Difference between the log-probs of a worker and of the learner for the canary "
            "tokens. With the right weights it is only a rounding error.",
            (
                Query(_by_worker(TrainSeries.WORKER_CANARY_ERROR), "{{run}}: worker {{worker}}"),
                Query(gauge(TrainMetric.CANARY_ERROR), "{{run}}: largest so far"),
            ),
            "suffix: nats",
            min=0,
        ),
        Panel(
            "Failed canaries",
            "Deliveries since the start of the run after which a worker sampled from other "
            "weights. Each stops the run.",
            (Query(gauge(TrainMetric.NUM_CANARY_FAILURES), _RUN),),
            "none",
            kind="stat",
            width=4,
            decimals=0,
            thresholds=((1, "red"),),
        ),
        Panel(
            "Workers",
            "Rollout workers with weights.",
            (Query(gauge(TrainSeries.WORKERS), _RUN),),
            "none",
            kind="stat",
            width=4,
            decimals=0,
        ),
        Panel(
            "Different weights",
            "Number of distinct content hashes of the workers' weights. More than one for longer "
            "than a delivery means that workers sample from different weights.",
            (
                Query(
                    f"count by ({RUN}) (count_values by ({RUN}) "
                    f'("hash", {_by_worker(TrainSeries.WORKER_HASH)}))',
                    _RUN,
                ),
            ),
            "none",
            min=0,
            decimals=0,
        ),
    ),
)
_SPEED = Row(
    "Throughput",
    (
        Panel(
            "Tokens",
            "Tokens per second: sampled by the rollout workers, computed by the learner (including "
            "prompts and padding), and in the loss.",
            (
                Query(
                    f"sum by ({RUN}) ({rate(TrainMetric.NUM_TOKENS_GENERATED, PLAYED)})",
                    "{{run}}: sampled",
                ),
                Query(rate(TrainMetric.NUM_TOKENS_FORWARDED), "{{run}}: computed"),
                Query(rate(TrainMetric.NUM_TOKENS_TRAINED), "{{run}}: in the loss"),
            ),
            "suffix: tokens/s",
            min=0,
        ),
        Panel(
            "Tokens sampled per worker",
            "Tokens per second per rollout worker. The value should not fall when workers are "
            "added.",
            (
                Query(
                    f"sum by ({RUN}) ({rate(TrainMetric.NUM_TOKENS_GENERATED, PLAYED)})\n"
                    f"  / {gauge(TrainSeries.WORKERS)}",
                    _RUN,
                ),
            ),
            "suffix: tokens/s",
            min=0,
        ),
        Panel(
            "Episodes",
            "Episodes per second in all environments of the run.",
            (Query(f"sum by ({RUN}) ({rate(TrainMetric.NUM_EPISODES, PLAYED)})", _RUN),),
            "suffix: episodes/s",
            min=0,
        ),
        Panel(
            "Idle shares",
            "Share of the time in which the learner waited for a batch, and in which the staleness "
            "limit paused sampling. If the first share is high, add rollout workers. If the second "
            "is high, rollout workers wait for the learner.",
            (
                Query(
                    f"{rate(TrainMetric.WAIT_FOR_BATCH_S)}\n  / ({rate(TrainMetric.STEP_S)} > 0)",
                    "{{run}}: learner",
                ),
                Query(
                    f"{rate(TrainMetric.ROLLOUT_IDLE_S)}\n  / ({rate(TrainMetric.STEP_S)} > 0)",
                    "{{run}}: sampling",
                ),
            ),
            "percentunit",
            min=0,
        ),
        Panel(
            "Buffer",
            "Groups that remain in the buffer after a batch was taken.",
            (Query(gauge(TrainMetric.BUFFER_DEPTH_GROUPS), _RUN),),
            "suffix: groups",
            min=0,
        ),
        Panel(
            "Hardware use",
            "Floating-point operations of the model per second of training, as a share of the "
            "device's peak.",
            (
                Query(
                    gauge(TrainMetric.MFU),
                    _RUN,
                    empty_unless="the device's peak is known",
                ),
            ),
            "percentunit",
            min=0,
        ),
        Panel(
            "Step duration",
            "Seconds between the ends of two steps, and seconds per step for checkpoints.",
            (
                Query(per_step(TrainMetric.STEP_S), "{{run}}: step"),
                Query(per_step(TrainMetric.CHECKPOINT_S), "{{run}}: checkpoints"),
            ),
            "s",
            min=0,
        ),
        Panel(
            "Computed tokens per batch token",
            "Below 100 %: common prefixes of samples are computed once (learner.packing = "
            '"tree"). Above 100 %: the excess is padding.',
            (
                Query(
                    f"{increase(TrainMetric.NUM_TOKENS_FORWARDED)}\n"
                    f"  / ({increase(TrainMetric.NUM_TOKENS_IN_BATCH)} > 0)",
                    _RUN,
                ),
            ),
            "percentunit",
            min=0,
        ),
    ),
)
_MACHINES = Row(
    "Machines of the run",
    (
        Panel(
            "Memory",
            "Share of each Ray node's memory in use. The head runs the driver and the buffer; the "
            "run stops if it runs out of memory.",
            (
                Query(
                    'max by (pod) (ray_node_mem_used{namespace=~"$namespace"})\n'
                    '  / (max by (pod) (ray_node_mem_total{namespace=~"$namespace"}) > 0)',
                    "{{pod}}",
                    empty_unless="Ray's own metrics are scraped",
                ),
            ),
            "percentunit",
            width=12,
            min=0,
            max=1,
        ),
        Panel(
            "GPUs",
            "GPU use of each Ray node, as reported by the GPU driver.",
            (
                Query(
                    'avg by (pod) (ray_node_gpus_utilization{namespace=~"$namespace"})',
                    "{{pod}}",
                    empty_unless="Ray's own metrics are scraped, and there are GPUs",
                ),
            ),
            "percent",
            width=12,
            min=0,
            max=100,
        ),
    ),
)

THROUGHPUT = Dashboard(
    uid="ludus-throughput",
    title="Ludus / Weights and throughput",
    description="Weight synchronization and throughput of runs.",
    variables=(
        variables.DATASOURCE,
        variables.NAMESPACES,
        variables.RUNS,
        variables.ENVIRONMENTS_OF_RUN,
        variables.WINDOW,
    ),
    rows=(_WEIGHTS, _SPEED, _MACHINES),
    annotations=(
        Annotation(
            "Checkpoint",
            f"{increase(TrainMetric.NUM_CHECKPOINTS, window='1m')} > 0",
            _RUN,
            "purple",
            empty_unless="a checkpoint was written within the last minute",
        ),
    ),
)
