"""Names of metrics, in one place: rows of metrics.jsonl, console and dashboards agree on them."""

from __future__ import annotations

from enum import StrEnum


class TrainMetric(StrEnum):
    """Values of one training step."""

    LOSS = "loss"
    REWARD_MEAN = "reward_mean"
    REWARD_STD = "reward_std"
    WIN_RATE = "win_rate"
    NUM_EPISODES = "num_episodes"
    NUM_EPISODES_LOST = "num_episodes_lost"
    NUM_EPISODES_INVALID = "num_episodes_invalid"
    NUM_EPISODES_TRUNCATED = "num_episodes_truncated"
    NUM_TURNS_MEAN = "num_turns_mean"
    DEAD_GROUP_RATIO = "dead_group_ratio"
    STALENESS_MEAN = "staleness_mean"
    STALENESS_MAX = "staleness_max"
    MISMATCH_KL = "mismatch_kl"
    REFERENCE_KL = "reference_kl"
    ENTROPY = "entropy"
    CLIP_RATIO = "clip_ratio"
    MASKED_SEQUENCE_RATIO = "masked_sequence_ratio"
    GRAD_NORM = "grad_norm"
    LEARNING_RATE = "learning_rate"
    NUM_TOKENS_GENERATED = "num_tokens_generated"
    NUM_TOKENS_TRAINED = "num_tokens_trained"
    NUM_TOKENS_FORWARDED = "num_tokens_forwarded"
    BUFFER_DEPTH_GROUPS = "buffer_depth_groups"
    WAIT_FOR_BATCH_S = "wait_for_batch_s"
    TRAIN_S = "train_s"
    WEIGHT_SYNC_S = "weight_sync_s"
    WEIGHT_SYNC_BYTES = "weight_sync_bytes"
    CANARY_ERROR = "canary_error"
    TOKENS_PER_SECOND = "tokens_per_second"
    EPISODES_PER_SECOND = "episodes_per_second"


class EvalMetric(StrEnum):
    """Values of one evaluation."""

    NUM_GAMES = "num_games"
    WIN_RATE = "win_rate"
    WIN_RATE_CI95_LOW = "win_rate_ci95_low"
    WIN_RATE_CI95_HIGH = "win_rate_ci95_high"
    DRAW_RATE = "draw_rate"
    RETURN_MEAN = "return_mean"
    RETURN_CI95_LOW = "return_ci95_low"
    RETURN_CI95_HIGH = "return_ci95_high"
    INVALID_RATE = "invalid_rate"
    GAP_CLOSED = "gap_closed"


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
