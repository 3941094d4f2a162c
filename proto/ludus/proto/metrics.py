"""Names of metrics, in one place: rows of metrics.jsonl, console and dashboards agree on them.

Metrics of a run know how they are combined, so that nobody averages averages:

    values of environments  --+
    values of steps         --+-- combine() --> values of the whole
    values of workers       --+

docs/metrics.md lists them all; it is written from this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

REWARD_TERM_PREFIX = "reward_term."
"""Before the name of a reward term: its mean per scored episode, before its weight."""
_PROMETHEUS_PREFIX = "ludus_train_"


class Reduction(StrEnum):
    """How values of parts become the value of the whole."""

    SUM = "sum"
    MEAN = "mean"
    """Weighted by another metric of the same part."""
    DEVIATION = "deviation"
    """Of all that the parts hold, around their common mean."""
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a metric is, and how its values are combined."""

    reduction: Reduction
    unit: str
    """Of one value; empty for counts and pure numbers."""
    help: str
    weight: str | None = None
    """The metric that a mean or deviation is weighted by; None counts every part once."""
    centre: str | None = None
    """The metric that a deviation is taken around."""
    of_environment: bool = False
    """True where every environment of a run has its own."""


def _of_environment(
    reduction: Reduction, unit: str, text: str, weight: str | None = None, centre: str | None = None
) -> Spec:
    return Spec(reduction, unit, text, weight, centre, of_environment=True)


def _per(weight: str, unit: str, text: str) -> Spec:
    """A mean over what the metric `weight` of the same environment counts."""
    return _of_environment(Reduction.MEAN, unit, text, weight)


def _per_episode(unit: str, text: str) -> Spec:
    return _per("num_episodes_scored", unit, text)


def _per_game(unit: str, text: str) -> Spec:
    return _per("num_games", unit, text)


def _per_token(unit: str, text: str) -> Spec:
    return Spec(Reduction.MEAN, unit, text, "num_tokens_trained")


def _count(text: str) -> Spec:
    return _of_environment(Reduction.SUM, "", text)


def _total(text: str, unit: str = "") -> Spec:
    return Spec(Reduction.SUM, unit, text)


def _seconds(text: str) -> Spec:
    return _total(text, "s")


def _end_of_interval(unit: str, text: str) -> Spec:
    # Intervals cannot be averaged; where evaluations follow each other, the last one counts.
    return _of_environment(Reduction.LAST, unit, text)


_REWARD_TERM = _per_episode("reward", "Reward term of an episode, before its weight.")


class _Metric(StrEnum):
    """A name, that of the member in small letters, with its Spec."""

    spec: Spec

    def __new__(cls, name: str, spec: Spec) -> _Metric:
        """The member: a string that has its Spec as an attribute."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.spec = spec
        return member


class TrainMetric(_Metric):
    """Values of one training step."""

    REWARD_MEAN = auto(), _per_episode("reward", "Reward of an episode, terms weighted.")
    REWARD_STD = (
        auto(),
        _of_environment(
            Reduction.DEVIATION,
            "reward",
            "Standard deviation of the episodes' rewards.",
            "num_episodes_scored",
            "reward_mean",
        ),
    )
    WIN_RATE = auto(), _per("num_episodes_finished", "share", "Episodes that succeeded.")
    NUM_WINS = auto(), _count("Episodes that succeeded, as the environment says.")
    NUM_DRAWS = auto(), _count("Episodes that did not succeed, with a return of 0.")
    NUM_LOSSES = auto(), _count("Episodes that did not succeed, with another return.")
    NUM_EPISODES = auto(), _count("Episodes played.")
    NUM_EPISODES_FINISHED = auto(), _count("Episodes that have a return.")
    NUM_EPISODES_SCORED = auto(), _count("Episodes that have a reward.")
    NUM_EPISODES_LOST = auto(), _count("Episodes that infrastructure voided.")
    NUM_EPISODES_FAILED = auto(), _count("Episodes voided by code that failed.")
    NUM_EPISODES_INVALID = auto(), _count("Episodes ended by text, not an action.")
    NUM_EPISODES_TRUNCATED = auto(), _count("Episodes cut off by a limit.")
    NUM_TURNS_MEAN = auto(), _per("num_episodes", "turns", "Turns of an episode.")
    NUM_TOOL_CALLS = auto(), _count("Calls of tools, the failed ones included.")
    NUM_TOOL_CALLS_FAILED = (
        auto(),
        _count("Calls of tools that returned an error, or that could not be read or made."),
    )
    NUM_EPISODES_WITH_TOOL_CALLS = auto(), _count("Episodes that called tools.")
    NUM_BRANCHES = (
        auto(),
        _count("Sequences that begin where another one of their episode went on (agents)."),
    )
    NUM_DEAD_AGENTS = (
        auto(),
        _count("Episodes voided since their agent failed, or did not end in time."),
    )
    NUM_GROUPS = auto(), _count("Groups played.")
    NUM_GROUPS_DEAD = auto(), _count("Groups whose rewards were all equal.")
    NUM_GROUPS_VOID = auto(), _count("Groups with fewer than two scored episodes.")
    NUM_GROUPS_STALE = auto(), _count("Groups dropped because they were too old.")
    NUM_GROUPS_ROLLED_BACK = auto(), _count("Groups played for a learner that died since.")
    ZERO_VARIANCE_GROUP_RATIO = (
        auto(),
        _per("num_groups", "share", "Groups whose rewards were all equal."),
    )
    NUM_GROUPS_TRAINED = auto(), _count("Groups in the batch.")
    STALENESS_MEAN = auto(), _per("num_groups_trained", "versions", "Age of the batch's groups.")
    STALENESS_MAX = (
        auto(),
        _of_environment(Reduction.MAX, "versions", "Age of the batch's oldest group."),
    )
    NUM_TOKENS_GENERATED = auto(), _count("Tokens sampled.")
    NUM_UNLOCKS = auto(), _count("Times that the curriculum opened the environment.")
    NUM_ENVIRONMENTS_OPEN = (
        auto(),
        Spec(Reduction.LAST, "environments", "Environments that the curriculum has opened."),
    )
    LOSS = auto(), Spec(Reduction.MEAN, "", "Value of the objective that was minimised.")
    VALUE_LOSS = auto(), _per_token("", "Loss of the value head.")
    EXPLAINED_VARIANCE = (
        auto(),
        _per_token("share", "Variance of the returns that the value head explains."),
    )
    MISMATCH_KL = auto(), _per_token("nats", "Divergence of the sampler from the learner.")
    REFERENCE_KL = auto(), _per_token("nats", "Divergence from the reference model.")
    ENTROPY = auto(), _per_token("nats", "Entropy of the policy where it sampled.")
    POLICY_KL = (
        auto(),
        Spec(
            Reduction.MEAN,
            "nats",
            "Divergence, per step, of a network before an update from what came of it.",
            "num_env_steps",
        ),
    )
    CLIP_RATIO = auto(), _per_token("share", "Sampled tokens at which the clip held.")
    MASKED_SEQUENCE_RATIO = (
        auto(),
        Spec(
            Reduction.MEAN,
            "share",
            "Samples that the correction took out of the loss.",
            "num_groups_trained",
        ),
    )
    MASKED_TOKEN_RATIO = (
        auto(),
        _per_token("share", "Sampled tokens that the correction took out of the loss."),
    )
    GRAD_NORM = auto(), Spec(Reduction.MEAN, "", "Norm of the gradient before clipping.")
    NUM_SKIPPED_UPDATES = auto(), _total("Updates left out: their gradient was not finite.")
    LEARNING_RATE = auto(), Spec(Reduction.LAST, "", "Learning rate of the step.")
    NUM_TOKENS_TRAINED = auto(), _total("Sampled tokens in the loss.")
    NUM_TOKENS_IN_BATCH = auto(), _total("Tokens of all samples, prompts included.")
    NUM_TOKENS_FORWARDED = auto(), _total("Tokens the learner's model computed, padding included.")
    NUM_ENV_STEPS = auto(), _total("Steps of the environments that a network learned from.")
    BUFFER_DEPTH_GROUPS = (
        auto(),
        Spec(Reduction.LAST, "groups", "Groups that wait after the batch was taken."),
    )
    STEP_S = auto(), _seconds("Time from one step's end to the next.")
    WAIT_FOR_BATCH_S = auto(), _seconds("Time the learner stood idle for a batch.")
    TRAIN_S = auto(), _seconds("Time in forward, backward and optimizer.")
    ROLLOUT_IDLE_S = (
        auto(),
        _seconds("Time in which sampling stood still: the staleness bound admitted nothing."),
    )
    WEIGHT_SYNC_S = (
        auto(),
        _seconds("Time from the last update until every worker samples from it."),
    )
    PUBLISH_S = auto(), _seconds("Time in which the learner published the weights.")
    DELIVER_S = auto(), _seconds("Time until all workers held what was published.")
    WEIGHT_FETCH_S = auto(), _seconds("Time the slowest worker took to fetch and check a version.")
    SAMPLER_PAUSE_S = (
        auto(),
        _seconds("Time in which a worker's sampling stood still for new weights, at most."),
    )
    WEIGHT_SYNC_BYTES = auto(), _total("Bytes of the published version.", "bytes")
    WEIGHT_FETCH_BYTES = auto(), _total("Bytes that all workers fetched for it.", "bytes")
    CANARY_ERROR = (
        auto(),
        Spec(Reduction.MAX, "nats", "Largest error of a canary on any worker so far."),
    )
    NUM_CANARY_FAILURES = (
        auto(),
        _total("Deliveries after which a worker sampled from other weights."),
    )
    NUM_ENVIRONMENT_RESTARTS = (
        auto(),
        _total("Environment servers that died and were started again."),
    )
    NUM_LEARNER_RESTARTS = auto(), _total("Times the learner's ranks were restarted.")
    NUM_CHECKPOINTS = auto(), _total("Checkpoints that were written.")
    CHECKPOINT_S = auto(), _seconds("Time in which training stood still for a checkpoint.")
    TOKENS_PER_SECOND = (
        auto(),
        Spec(Reduction.MEAN, "tokens/s", "Tokens sampled per second of the step.", "step_s"),
    )
    EPISODES_PER_SECOND = (
        auto(),
        Spec(Reduction.MEAN, "episodes/s", "Episodes played per second of the step.", "step_s"),
    )
    MFU = (
        auto(),
        Spec(
            Reduction.MEAN,
            "share",
            "Floating-point work of the model per second of training, of what the device can do.",
            "train_s",
        ),
    )


class EvalMetric(_Metric):
    """Values of one evaluation."""

    NUM_GAMES = auto(), _count("Games of the evaluation.")
    NUM_GAMES_VOID = auto(), _count("Games beside them that failed.")
    WIN_RATE = auto(), _per_game("share", "Games that succeeded, as the environment says.")
    WIN_RATE_CI95_LOW = (
        auto(),
        _end_of_interval("share", "Lower end of the win rate's Wilson interval."),
    )
    WIN_RATE_CI95_HIGH = (
        auto(),
        _end_of_interval("share", "Upper end of the win rate's Wilson interval."),
    )
    DRAW_RATE = auto(), _per_game("share", "Games that did not succeed, with a return of 0.")
    RETURN_MEAN = auto(), _per_game("reward", "Return of a game.")
    RETURN_CI95_LOW = auto(), _end_of_interval("reward", "Lower end of the mean's 95 % interval.")
    RETURN_CI95_HIGH = auto(), _end_of_interval("reward", "Upper end of the mean's 95 % interval.")
    INVALID_RATE = auto(), _per_game("share", "Games ended by text that was no action.")
    GAP_CLOSED = (
        auto(),
        _per_game("share", "Part of the way from the random to the optimal policy."),
    )


class TrainSeries(StrEnum):
    """What a run exports to Prometheus beside the metrics of its rows."""

    RUN = "ludus_train_run"
    PHASE = "ludus_train_phase"
    PHASE_START = "ludus_train_phase_start_timestamp_seconds"
    STEP = "ludus_train_step"
    STEPS = "ludus_train_steps"
    """A counter: gets `_total` there."""
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
    """What an environment server exports to Prometheus; counters get `_total` there."""

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
    """What a gateway exports to Prometheus; counters get `_total` there, build `_info`."""

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
    """The metric's name on a dashboard, in base units; counters get `_total` there."""
    place = "eval_" if isinstance(metric, EvalMetric) else ""
    name = metric.value.removeprefix("num_")
    if metric.spec.unit == "s":
        name = name.removesuffix("_s") + "_seconds"
    return f"{_PROMETHEUS_PREFIX}{place}{name}"


def combine(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The training values of the whole, from those of its parts in the order of time.

    A metric that a part lacks is combined over the others.
    """
    rows = list(parts)
    specs = {str(metric): metric.spec for metric in TrainMetric}
    whole = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        of_term = name.startswith(REWARD_TERM_PREFIX)
        value = _combined(name, _REWARD_TERM if of_term else specs[name], rows)
        if value is not None:
            whole[name] = value
    return whole


def combined(
    metric: TrainMetric | EvalMetric | str, parts: Iterable[Mapping[str, float]]
) -> float | None:
    """One metric of the whole, or one reward term by its name; None where no part has it."""
    spec = metric.spec if isinstance(metric, _Metric) else _REWARD_TERM
    return _combined(metric, spec, list(parts))


def _combined(name: str, spec: Spec, parts: Sequence[Mapping[str, float]]) -> float | None:
    """The combined value; None where it was not measured."""
    rows = [row for row in parts if name in row]
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
            return _mean(values, _weights(spec, rows))
        case Reduction.DEVIATION:
            return _deviation(values, spec, rows)


def _weights(spec: Spec, rows: Sequence[Mapping[str, float]]) -> list[float]:
    if spec.weight is None or any(spec.weight not in row for row in rows):
        return [1.0] * len(rows)
    return [row[spec.weight] for row in rows]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    total = math.fsum(weights)
    if total == 0:
        return None
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total


def _deviation(
    values: Sequence[float], spec: Spec, rows: Sequence[Mapping[str, float]]
) -> float | None:
    """Var = mean of (var_i + centre_i^2) - (mean of centre_i)^2, all means weighted."""
    weights = _weights(spec, rows)
    centres = [row[spec.centre] for row in rows] if spec.centre else [0.0] * len(rows)
    common = _mean(centres, weights)
    if common is None:
        return None
    squares = [
        value**2 + (centre - common) ** 2 for value, centre in zip(values, centres, strict=True)
    ]
    variance = _mean(squares, weights)
    return None if variance is None else math.sqrt(variance)
