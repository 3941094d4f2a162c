"""How weights travel and how fast the run is: sync, canary, tokens, idle time, buffer."""

from __future__ import annotations

from grafana import variables
from grafana.model import Annotation, Dashboard, Panel, Query, Row
from grafana.queries import OF_RUN, PLAYED, RUN, gauge, increase, per_step, rate
from ludus.proto.metrics import TrainMetric, TrainSeries

_OF_WORKER = f"{RUN}, worker"
_RUN = "{{run}}"


def _of_worker(series: TrainSeries) -> str:
    return f"max by ({_OF_WORKER}) ({series}{{{OF_RUN}}})"


_WEIGHTS = Row(
    "Weights",
    (
        Panel(
            "Version behind the learner",
            "How many versions each rollout worker is behind the learner's newest step.",
            (
                Query(
                    f"{gauge(TrainSeries.STEP)}\n"
                    f"  - on ({RUN}) group_right () {_of_worker(TrainSeries.WORKER_VERSION)}",
                    "{{run}}: worker {{worker}}",
                ),
            ),
            "suffix: versions",
            min=0,
            decimals=0,
        ),
        Panel(
            "Time of a sync",
            "From the last update until every worker samples from it, per step: publishing holds "
            "up the learner, delivering runs beside the next step.",
            (
                Query(per_step(TrainMetric.PUBLISH_S), "{{run}}: publish"),
                Query(per_step(TrainMetric.DELIVER_S), "{{run}}: deliver"),
                Query(per_step(TrainMetric.WEIGHT_FETCH_S), "{{run}}: fetch, slowest worker"),
                Query(per_step(TrainMetric.SAMPLER_PAUSE_S), "{{run}}: pause of sampling"),
            ),
            "s",
            min=0,
        ),
        Panel(
            "Bytes of a sync",
            "Bytes of a published version, and those that all workers fetched for it.",
            (
                Query(per_step(TrainMetric.WEIGHT_SYNC_BYTES), "{{run}}: published"),
                Query(per_step(TrainMetric.WEIGHT_FETCH_BYTES), "{{run}}: fetched"),
            ),
            "bytes",
            min=0,
        ),
        Panel(
            "Canary error",
            "Difference between the log-probs that a worker and the learner give the tokens of a "
            "fixed answer. It is rounding as long as the worker samples from the right weights.",
            (
                Query(_of_worker(TrainSeries.WORKER_CANARY_ERROR), "{{run}}: worker {{worker}}"),
                Query(gauge(TrainMetric.CANARY_ERROR), "{{run}}: largest so far"),
            ),
            "suffix: nats",
            min=0,
        ),
        Panel(
            "Failed canaries",
            "Deliveries after which a worker sampled from other weights, since the run began. "
            "Each ends the run.",
            (Query(gauge(TrainMetric.NUM_CANARY_FAILURES), _RUN),),
            "none",
            kind="stat",
            width=4,
            decimals=0,
            thresholds=((1, "red"),),
        ),
        Panel(
            "Workers",
            "Rollout workers that hold weights.",
            (Query(gauge(TrainSeries.WORKERS), _RUN),),
            "none",
            kind="stat",
            width=4,
            decimals=0,
        ),
        Panel(
            "Different weights",
            "Contents that the workers hold, counted by their hash: more than one for longer "
            "than a delivery means that workers sample from different weights.",
            (
                Query(
                    f"count by ({RUN}) (count_values by ({RUN}) "
                    f'("hash", {_of_worker(TrainSeries.WORKER_HASH)}))',
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
            "Tokens per second: sampled by the rollout workers, computed by the learner with "
            "prompts and padding, and in the loss.",
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
            "Tokens per second and rollout worker: it should not fall as workers are added.",
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
            "Episodes per second, in the run's environments together.",
            (Query(f"sum by ({RUN}) ({rate(TrainMetric.NUM_EPISODES, PLAYED)})", _RUN),),
            "suffix: episodes/s",
            min=0,
        ),
        Panel(
            "Idle shares",
            "Share of the time in which the learner waited for a batch, and in which sampling "
            "stood still because the staleness bound admitted nothing. Where the first is high, "
            "add rollout workers; where the second is, they wait for the learner.",
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
            "Groups that wait for training after a batch was taken.",
            (Query(gauge(TrainMetric.BUFFER_DEPTH_GROUPS), _RUN),),
            "suffix: groups",
            min=0,
        ),
        Panel(
            "Use of the hardware",
            "Floating-point work of the model per second of training, of what the device can do.",
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
            "Time of a step",
            "Seconds from one step's end to the next, and per step what checkpoints take.",
            (
                Query(per_step(TrainMetric.STEP_S), "{{run}}: step"),
                Query(per_step(TrainMetric.CHECKPOINT_S), "{{run}}: checkpoints"),
            ),
            "s",
            min=0,
        ),
        Panel(
            "Tokens computed of those in the batch",
            "Below 100 %: what samples begin with in common is computed once (learner.packing = "
            '"tree"). Above: the rest is padding.',
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
            "Memory in use of what each Ray node has. The head holds driver and buffer: the run "
            "ends when it runs out.",
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
            "Use of each Ray node's GPUs, as their driver tells it.",
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
    description="How weights travel and how fast the run is.",
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
