"""Names and descriptions of all metrics, shared by metrics.jsonl, the console and dashboards.

Each metric of a run has a reduction, which combines the values of several rows into one value:

    values of environments  --+
    values of steps         --+-- combine_metrics() --> values of the run
    values of workers       --+

To add a metric, declare it here, and compute its value in `ludus.trainer.driver.loops.step_values`,
or in `ludus.trainer.learner.step_metrics` if the learner measures it. Sinks, docs/metrics.md and
Prometheus need no further code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

REWARD_TERM_PREFIX = "reward_term."
"""Prefix of the metric of a reward term: its mean per episode with a reward, without its
weight."""
_PROMETHEUS_PREFIX = "ludus_train_"


class Reduction(StrEnum):
    """Way to combine the values of several rows into one value."""

    SUM = "sum"
    MEAN = "mean"
    """Mean, weighted by another metric of the same row."""
    DEVIATION = "deviation"
    """Standard deviation of all elements behind the rows, around their common mean."""
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Unit, description and reduction of a metric."""

    reduction: Reduction
    unit: str
    """Unit of the value; empty for counts and pure numbers."""
    help: str
    weight: str | None = None
    """Metric that weights a mean or deviation. None weights all rows equally."""
    center: str | None = None
    """Metric with the mean that a deviation refers to."""
    is_per_environment: bool = False
    """True if each environment of a run has its own value."""


def _make_environment_spec(
    reduction: Reduction,
    unit: str,
    description: str,
    weight: str | None = None,
    center: str | None = None,
) -> MetricSpec:
    return MetricSpec(reduction, unit, description, weight, center, is_per_environment=True)


def _make_mean(weight: str, unit: str, description: str) -> MetricSpec:
    return _make_environment_spec(Reduction.MEAN, unit, description, weight)


def _make_episode_mean(unit: str, description: str) -> MetricSpec:
    return _make_mean("num_episodes_scored", unit, description)


def _make_game_mean(unit: str, description: str) -> MetricSpec:
    return _make_mean("num_games", unit, description)


def _make_token_mean(unit: str, description: str) -> MetricSpec:
    return MetricSpec(Reduction.MEAN, unit, description, "num_tokens_trained")


def _make_count(description: str) -> MetricSpec:
    return _make_environment_spec(Reduction.SUM, "", description)


def _make_total(description: str, unit: str = "") -> MetricSpec:
    return MetricSpec(Reduction.SUM, unit, description)


def _make_duration(description: str) -> MetricSpec:
    return _make_total(description, "s")


def _make_interval_bound(unit: str, description: str) -> MetricSpec:
    # Intervals cannot be averaged, so the last evaluation counts.
    return _make_environment_spec(Reduction.LAST, unit, description)


_REWARD_TERM = _make_episode_mean("reward", "Reward term of an episode, without its weight.")


class _Metric(StrEnum):
    """A metric name, which is the member name in lower case, with its spec."""

    spec: MetricSpec

    def __new__(cls, name: str, spec: MetricSpec) -> _Metric:
        """Create a member, which is a string with the attribute `spec`."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.spec = spec
        return member


class TrainMetric(_Metric):
    """Metrics of one training step."""

    REWARD_MEAN = auto(), _make_episode_mean("reward", "Reward of an episode.")
    REWARD_STD = (
        auto(),
        _make_environment_spec(
            Reduction.DEVIATION,
            "reward",
            "Standard deviation of the episodes' rewards.",
            "num_episodes_scored",
            "reward_mean",
        ),
    )
    WIN_RATE = (
        auto(),
        _make_mean("num_episodes_finished", "share", "Share of episodes that succeeded."),
    )
    NUM_WINS = auto(), _make_count("Episodes whose environment reported a success.")
    NUM_DRAWS = auto(), _make_count("Episodes without success and with a return of 0.")
    NUM_LOSSES = auto(), _make_count("Episodes without success and with a return other than 0.")
    NUM_EPISODES = auto(), _make_count("Episodes that were played.")
    NUM_EPISODES_FINISHED = auto(), _make_count("Episodes with a return.")
    NUM_EPISODES_SCORED = auto(), _make_count("Episodes with a reward.")
    NUM_EPISODES_LOST = auto(), _make_count("Episodes that the infrastructure ended.")
    NUM_EPISODES_FAILED = auto(), _make_count("Episodes in which code raised an error.")
    NUM_EPISODES_INVALID = (
        auto(),
        _make_count("Episodes that ended with text that is not an action."),
    )
    NUM_EPISODES_TRUNCATED = auto(), _make_count("Episodes that a limit cut off.")
    NUM_TURNS_MEAN = auto(), _make_mean("num_episodes", "turns", "Turns of an episode.")
    NUM_TOOL_CALLS = auto(), _make_count("Tool calls, including failed calls.")
    NUM_TOOL_CALLS_FAILED = (
        auto(),
        _make_count("Tool calls that returned an error, or could not be parsed or executed."),
    )
    NUM_EPISODES_WITH_TOOL_CALLS = auto(), _make_count("Episodes with tool calls.")
    NUM_BRANCHES = (
        auto(),
        _make_count("Sequences that branch off from another sequence of their episode (agents)."),
    )
    NUM_FAILED_AGENTS = (
        "num_dead_agents",
        _make_count("Episodes whose agent failed or exceeded its time limit."),
    )
    NUM_GROUPS = auto(), _make_count("Groups that were played.")
    NUM_ZERO_VARIANCE_GROUPS = "num_groups_dead", _make_count("Groups whose rewards are all equal.")
    NUM_GROUPS_REPLACED = auto(), _make_count("Zero-variance groups that were replaced.")
    NUM_GROUPS_KEPT = auto(), _make_count("Zero-variance groups kept at max_group_batches.")
    NUM_GROUPS_VOID = auto(), _make_count("Groups with fewer than two episodes with a reward.")
    NUM_GROUPS_STALE = auto(), _make_count("Groups that were dropped because of their staleness.")
    NUM_GROUPS_ROLLED_BACK = auto(), _make_count("Groups that were lost when the learner died.")
    ZERO_VARIANCE_GROUP_RATIO = (
        auto(),
        _make_mean("num_groups", "share", "Share of groups whose rewards are all equal."),
    )
    NUM_GROUPS_TRAINED = auto(), _make_count("Groups in the batch.")
    STALENESS_MEAN = (
        auto(),
        _make_mean("num_groups_trained", "versions", "Mean staleness of the groups in the batch."),
    )
    STALENESS_MAX = (
        auto(),
        _make_environment_spec(
            Reduction.MAX, "versions", "Largest staleness of a group in the batch."
        ),
    )
    NUM_TOKENS_GENERATED = auto(), _make_count("Tokens that were sampled.")
    NUM_STEPS_WITHOUT_VARIANCE = auto(), _make_total("Steps whose groups all have equal rewards.")
    NUM_UNLOCKS = auto(), _make_count("Number of times that the curriculum opened the environment.")
    NUM_ENVIRONMENTS_OPEN = (
        auto(),
        MetricSpec(Reduction.LAST, "environments", "Open environments of the curriculum."),
    )
    LOSS = auto(), MetricSpec(Reduction.MEAN, "", "Loss.")
    VALIDATION_LOSS = (
        auto(),
        MetricSpec(
            Reduction.LAST, "nats", "Loss per trained token of the held-out conversations (SFT)."
        ),
    )
    VALUE_LOSS = auto(), _make_token_mean("", "Loss of the critic.")
    EXPLAINED_VARIANCE = (
        auto(),
        _make_token_mean("share", "Share of the variance of the returns that the critic explains."),
    )
    MISMATCH_KL = auto(), _make_token_mean("nats", "KL divergence between sampler and learner.")
    REFERENCE_KL = auto(), _make_token_mean("nats", "KL divergence from the reference model.")
    ENTROPY = auto(), _make_token_mean("nats", "Entropy of the policy per sampled token.")
    POLICY_KL = (
        auto(),
        MetricSpec(
            Reduction.MEAN,
            "nats",
            "KL divergence of a network from its previous state, per environment step.",
            "num_env_steps",
        ),
    )
    CLIP_RATIO = auto(), _make_token_mean("share", "Share of sampled tokens with a clipped ratio.")
    MASKED_SEQUENCE_RATIO = (
        auto(),
        MetricSpec(
            Reduction.MEAN,
            "share",
            "Share of samples that the correction masked.",
            "num_groups_trained",
        ),
    )
    MASKED_TOKEN_RATIO = (
        auto(),
        _make_token_mean("share", "Share of sampled tokens that the correction masked."),
    )
    GRAD_NORM = auto(), MetricSpec(Reduction.MEAN, "", "Norm of the gradient before clipping.")
    NUM_SKIPPED_UPDATES = (
        auto(),
        _make_total("Updates that were skipped because their gradient was not finite."),
    )
    LEARNING_RATE = auto(), MetricSpec(Reduction.LAST, "", "Learning rate of the step.")
    ENTROPY_COEF = auto(), MetricSpec(Reduction.LAST, "", "Coefficient of the entropy bonus.")
    NUM_TOKENS_TRAINED = auto(), _make_total("Sampled tokens in the loss.")
    NUM_TOKENS_IN_BATCH = auto(), _make_total("Tokens of all samples, including prompts.")
    NUM_TOKENS_FORWARDED = (
        auto(),
        _make_total("Tokens that the learner's model computed, including padding."),
    )
    NUM_ENV_STEPS = auto(), _make_total("Environment steps that a network was trained on.")
    BUFFER_DEPTH_GROUPS = (
        auto(),
        MetricSpec(Reduction.LAST, "groups", "Groups in the buffer after the batch was taken."),
    )
    STEP_S = auto(), _make_duration("Duration of a step, without evaluations and checkpoints.")
    WAIT_FOR_BATCH_S = auto(), _make_duration("Time that the learner waited for a batch.")
    TRAIN_S = auto(), _make_duration("Time of the forward and backward passes and the optimizer.")
    ROLLOUT_IDLE_S = (
        auto(),
        _make_duration("Time that sampling paused because of the staleness limit."),
    )
    WEIGHT_SYNC_S = (
        auto(),
        _make_duration("Time from the last update until all workers sample with its weights."),
    )
    PUBLISH_S = auto(), _make_duration("Time that the learner took to publish the weights.")
    DELIVER_S = auto(), _make_duration("Time until all workers had loaded the published weights.")
    WEIGHT_FETCH_S = (
        auto(),
        _make_duration("Time that the slowest worker took to fetch and check a version."),
    )
    SAMPLER_PAUSE_S = (
        auto(),
        _make_duration("Longest time that a worker paused sampling for new weights."),
    )
    WEIGHT_SYNC_BYTES = auto(), _make_total("Size of the published version.", "bytes")
    WEIGHT_FETCH_BYTES = auto(), _make_total("Bytes that all workers fetched.", "bytes")
    CANARY_ERROR = (
        auto(),
        MetricSpec(Reduction.MAX, "nats", "Largest canary error of any worker so far."),
    )
    NUM_CANARY_FAILURES = (
        auto(),
        _make_total("Failed canary checks: the worker did not sample with the published weights."),
    )
    NUM_ENVIRONMENT_RESTARTS = auto(), _make_total("Restarts of environment servers.")
    NUM_LEARNER_RESTARTS = auto(), _make_total("Restarts of the learner's ranks.")
    NUM_CHECKPOINTS = auto(), _make_total("Checkpoints that were written.")
    CHECKPOINT_S = auto(), _make_duration("Time that training paused for a checkpoint.")
    TOKENS_PER_SECOND = (
        auto(),
        MetricSpec(Reduction.MEAN, "tokens/s", "Sampled tokens per second of the step.", "step_s"),
    )
    EPISODES_PER_SECOND = (
        auto(),
        MetricSpec(
            Reduction.MEAN, "episodes/s", "Played episodes per second of the step.", "step_s"
        ),
    )
    MFU = (
        auto(),
        MetricSpec(
            Reduction.MEAN,
            "share",
            "Floating-point operations of the model per second, relative to the device's peak.",
            "train_s",
        ),
    )


class EvalMetric(_Metric):
    """Metrics of one evaluation."""

    NUM_GAMES = auto(), _make_count("Episodes with a result.")
    NUM_GAMES_VOID = auto(), _make_count("Void episodes, which have no result.")
    WIN_RATE = (
        auto(),
        _make_game_mean("share", "Share of episodes whose environment reported a success."),
    )
    WIN_RATE_CI95_LOW = (
        auto(),
        _make_interval_bound(
            "share", "Lower bound of the 95 % Wilson interval of the win rate, over tasks."
        ),
    )
    WIN_RATE_CI95_HIGH = (
        auto(),
        _make_interval_bound(
            "share", "Upper bound of the 95 % Wilson interval of the win rate, over tasks."
        ),
    )
    DRAW_RATE = (
        auto(),
        _make_game_mean("share", "Share of episodes without success and with a return of 0."),
    )
    RETURN_MEAN = auto(), _make_game_mean("reward", "Mean return of an episode.")
    RETURN_CI95_LOW = (
        auto(),
        _make_interval_bound(
            "reward", "Lower bound of the 95 % interval of the mean return, over tasks."
        ),
    )
    RETURN_CI95_HIGH = (
        auto(),
        _make_interval_bound(
            "reward", "Upper bound of the 95 % interval of the mean return, over tasks."
        ),
    )
    INVALID_RATE = (
        auto(),
        _make_game_mean("share", "Share of episodes that ended with text that is not an action."),
    )
    GAP_CLOSED = (
        auto(),
        _make_game_mean(
            "share", "Share of the gap between the random and the optimal policy that is closed."
        ),
    )


class TrainSeries(StrEnum):
    """Prometheus series of a run that are not metrics of its rows."""

    RUN = "ludus_train_run"
    PHASE = "ludus_train_phase"
    PHASE_START = "ludus_train_phase_start_timestamp_seconds"
    STEP = "ludus_train_step"
    STEPS = "ludus_train_steps"
    """Counter, with the suffix `_total` in Prometheus."""
    TARGET_STEPS = "ludus_train_target_steps"
    LAST_STEP = "ludus_train_last_step_timestamp_seconds"
    LAST_CHECKPOINT = "ludus_train_last_checkpoint_timestamp_seconds"
    ELAPSED = "ludus_train_elapsed_seconds"
    GAMES_TRAINED = "ludus_train_games_trained"
    REWARD_TERM = "ludus_train_reward_term_mean"
    WORKERS = "ludus_train_workers"
    WORKER_VERSION = "ludus_train_worker_weights_version"
    WORKER_HASH = "ludus_train_worker_weights_hash"
    WORKER_CANARY_ERROR = "ludus_train_worker_canary_error"


class EnvServerMetric(StrEnum):
    """Prometheus series of an environment server. Counters have the suffix `_total` there."""

    SESSIONS = "env_server_sessions"
    SESSION_CAPACITY = "env_server_session_capacity"
    OPENS_WAITING = "env_server_opens_waiting"
    DRAINING = "env_server_draining"
    OPENS = "env_server_opens"
    RESETS = "env_server_resets"
    STEPS = "env_server_steps"
    ERRORS = "env_server_errors"
    SESSION_ENDS = "env_server_session_ends"
    STEP_DURATION = "env_server_step_duration_seconds"
    WORKERS = "env_server_workers"
    WORKER_ENDS = "env_server_worker_ends"
    SANDBOX_LAYER = "env_server_sandbox_layer"


class GatewayMetric(StrEnum):
    """Prometheus series of a gateway.

    In Prometheus, counters have the suffix `_total` and BUILD has the suffix `_info`.
    """

    SESSIONS = "ludus_gateway_sessions"
    SESSION_CAPACITY = "ludus_gateway_session_capacity"
    SERVERS = "ludus_gateway_servers"
    OPENS = "ludus_gateway_opens"
    CALLS = "ludus_gateway_calls"
    CALL_SECONDS = "ludus_gateway_call_seconds"
    QUEUE_WAIT_SECONDS = "ludus_gateway_queue_wait_seconds"
    SESSIONS_LOST = "ludus_gateway_sessions_lost"
    AUTH_FAILURES = "ludus_gateway_auth_failures"
    RATE_LIMITED = "ludus_gateway_rate_limited"
    BUILD = "ludus_gateway_build"


def prometheus_name(metric: TrainMetric | EvalMetric) -> str:
    """Return the metric's name in Prometheus, without the suffix `_total` of counters."""
    infix = "eval_" if isinstance(metric, EvalMetric) else ""
    name = metric.value.removeprefix("num_")
    if metric.spec.unit == "s":
        name = name.removesuffix("_s") + "_seconds"
    return f"{_PROMETHEUS_PREFIX}{infix}{name}"


def combine_metrics(metric_rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the combined training metrics of rows, which are in chronological order.

    Rows without a metric are skipped for that metric.
    """
    rows = list(metric_rows)
    specs = {str(metric): metric.spec for metric in TrainMetric}
    values = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        spec = _REWARD_TERM if name.startswith(REWARD_TERM_PREFIX) else specs[name]
        value = _combine_values(name, spec, rows)
        if value is not None:
            values[name] = value
    return values


def combine_metric(
    metric: TrainMetric | EvalMetric | str, metric_rows: Iterable[Mapping[str, float]]
) -> float | None:
    """Return one combined metric, or None if no row has it.

    Args:
        metric: a metric, or the name of a reward term's metric.
    """
    spec = metric.spec if isinstance(metric, _Metric) else _REWARD_TERM
    return _combine_values(metric, spec, list(metric_rows))


def _combine_values(
    name: str, spec: MetricSpec, metric_rows: Sequence[Mapping[str, float]]
) -> float | None:
    rows = [row for row in metric_rows if name in row]
    values = [row[name] for row in rows]
    if not values:
        return None
    match spec.reduction:
        case Reduction.SUM:
            return math.fsum(values)
        case Reduction.MAX:
            return max(values)
        case Reduction.LAST:
            return values[-1]
        case Reduction.MEAN:
            return _compute_mean(values, _get_weights(spec, rows))
        case Reduction.DEVIATION:
            return _compute_deviation(values, spec, rows)


def _get_weights(spec: MetricSpec, rows: Sequence[Mapping[str, float]]) -> list[float]:
    if spec.weight is None or any(spec.weight not in row for row in rows):
        return [1.0] * len(rows)
    return [row[spec.weight] for row in rows]


def _compute_mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    total = math.fsum(weights)
    if total == 0:
        return None
    weighted_values = (value * weight for value, weight in zip(values, weights, strict=True))
    return math.fsum(weighted_values) / total


def _compute_deviation(
    values: Sequence[float], spec: MetricSpec, rows: Sequence[Mapping[str, float]]
) -> float | None:
    """Return the combined deviation: Var = weighted mean of var_i + (center_i - center)^2."""
    weights = _get_weights(spec, rows)
    centers = [row[spec.center] for row in rows] if spec.center else [0.0] * len(rows)
    center = _compute_mean(centers, weights)
    if center is None:
        return None
    second_moments = [
        value**2 + (row_center - center) ** 2
        for value, row_center in zip(values, centers, strict=True)
    ]
    variance = _compute_mean(second_moments, weights)
    return None if variance is None else math.sqrt(variance)
