"""Series that Prometheus scrapes on a healthy platform and in the scenario of each alert.

Prometheus scrapes once per minute. Values are in promtool's notation: `0+6xN` is 0, 6, 12, ... for
the N minutes of the scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Labels = Mapping[str, str]


def select_series(name: str, labels: str = "") -> str:
    """Return the selector of one series in the release's namespace."""
    return f'{name}{{namespace="ludus"{", " * bool(labels)}{labels}}}'


def select_gateway_series(name: str, labels: str = "", pod: str = "gateway-1") -> str:
    """Return the selector of a gateway's series for the environment."""
    return select_series(name, f'pod="{pod}", env="blackjack"{", " * bool(labels)}{labels}')


def select_run_series(name: str, labels: str = "", pod: str = "head-1") -> str:
    """Return the selector of a series for the whole run."""
    return select_series(name, f'pod="{pod}", run="first"{", " * bool(labels)}{labels}')


def select_environment_series(name: str, labels: str = "") -> str:
    """Return the selector of a series for the run's environment."""
    environment_labels = 'environment="blackjack", opponent="environment"'
    return select_run_series(name, f"{environment_labels}{', ' * bool(labels)}{labels}")


def _select_build_info(pod: str) -> str:
    return select_series("ludus_gateway_build_info", f'pod="{pod}"')


def _select_target_up(pod: str, job: str) -> str:
    return select_series("up", f'job="{job}", pod="{pod}", release="main"')


def _select_opens(outcome: str) -> str:
    return select_gateway_series("ludus_gateway_opens_total", f'outcome="{outcome}"')


def _select_calls(code: str) -> str:
    return select_gateway_series("ludus_gateway_calls_total", f'call="step", code="{code}"')


def _select_step_time_bucket(le: str) -> str:
    return select_gateway_series("ludus_gateway_call_seconds_bucket", f'call="step", le="{le}"')


def _select_queue_wait_bucket(le: str) -> str:
    return select_gateway_series("ludus_gateway_queue_wait_seconds_bucket", f'le="{le}"')


def _select_sessions(state: str) -> str:
    return select_gateway_series("ludus_gateway_sessions", f'state="{state}"')


def _select_servers(state: str) -> str:
    return select_gateway_series("ludus_gateway_servers", f'state="{state}"')


def _select_phase(phase: str) -> str:
    return select_run_series("ludus_train_phase", f'phase="{phase}"')


def _select_worker(name: str, worker: int) -> str:
    return select_run_series(f"ludus_train_worker_weights_{name}", f'worker="{worker}"')


def _select_win_rate(bound: str) -> str:
    return select_environment_series(f"ludus_train_eval_win_rate_ci95_{bound}", 'policy="trained"')


def _select_job(status: str) -> str:
    labels = f'name="first", deployment_status="{status}"'
    return select_series("kuberay_job_deployment_status", labels)


def _select_head_memory(quantity: str) -> str:
    return select_series(f"ray_node_mem_{quantity}", 'pod="head-1", IsHeadNode="true"')


_SESSIONS_LOST = select_gateway_series("ludus_gateway_sessions_lost_total")
_AUTH_FAILURES = select_series(
    "ludus_gateway_auth_failures_total", 'pod="gateway-1", kind="expired"'
)
_WORKER_ENDS = select_series("env_server_worker_ends_total", 'pod="server-1", env="openspiel_env"')
_EPISODES = select_environment_series("ludus_train_episodes_total")
_EPISODES_LOST = select_environment_series("ludus_train_episodes_lost_total")
_EPISODES_FAILED = select_environment_series("ludus_train_episodes_failed_total")
_GROUPS = select_environment_series("ludus_train_groups_total")
_ZERO_VARIANCE_GROUPS = select_environment_series("ludus_train_groups_dead_total")
_LAST_STEP = select_run_series("ludus_train_last_step_timestamp_seconds")
_LAST_CHECKPOINT = select_run_series("ludus_train_last_checkpoint_timestamp_seconds")
_PHASE_START = select_run_series("ludus_train_phase_start_timestamp_seconds")
_STEPS = select_run_series("ludus_train_steps_total")
_STEP_SECONDS = select_run_series("ludus_train_step_seconds_total")
_WAIT_SECONDS = select_run_series("ludus_train_wait_for_batch_seconds_total")
_SYNC_SECONDS = select_run_series("ludus_train_weight_sync_seconds_total")
_CANARY_FAILURES = select_run_series("ludus_train_canary_failures_total")
_LEARNER_RESTARTS = select_run_series("ludus_train_learner_restarts_total")
_MISMATCH = select_run_series("ludus_train_mismatch_kl")
_RUN_INFO = select_run_series("ludus_train_run")

HEALTHY_SERIES: dict[str, str] = {
    _select_build_info("gateway-1"): "1xN",
    _select_build_info("gateway-2"): "1xN",
    _select_target_up("gateway-1", "gateway"): "1xN",
    _select_target_up("server-1", "environment"): "1xN",
    _select_target_up("head-1", "trainer"): "1xN",
    _select_sessions("active"): "50xN",
    _select_sessions("pending"): "0xN",
    select_gateway_series("ludus_gateway_sessions", 'state="active"', pod="gateway-2"): "50xN",
    select_gateway_series("ludus_gateway_session_capacity"): "100xN",
    _select_servers("ready"): "2xN",
    _select_servers("unreachable"): "0xN",
    _select_opens("opened"): "0+60xN",
    _select_opens("no_capacity"): "0xN",
    _select_opens("rate_limited"): "0xN",
    _select_calls("OK"): "0+1000xN",
    _select_calls("UNAVAILABLE"): "0xN",
    _select_calls("VALIDATION_ERROR"): "0+100xN",
    _select_step_time_bucket("5.0"): "0+1000xN",
    _select_step_time_bucket("10.0"): "0+1000xN",
    _select_step_time_bucket("+Inf"): "0+1000xN",
    _select_queue_wait_bucket("10.0"): "0+60xN",
    _select_queue_wait_bucket("20.0"): "0+60xN",
    _select_queue_wait_bucket("+Inf"): "0+60xN",
    _SESSIONS_LOST: "0xN",
    _AUTH_FAILURES: "0+1xN",
    _WORKER_ENDS: "0xN",
    _select_job("Running"): "1xN",
    _select_head_memory("used"): "5xN",
    _select_head_memory("total"): "10xN",
    _RUN_INFO: "1xN",
    _select_phase("train"): "1xN",
    _select_phase("start_workers"): "0xN",
    _PHASE_START: "0xN",
    _LAST_STEP: "0+60xN",
    _LAST_CHECKPOINT: "0+60xN",
    select_run_series("ludus_train_step"): "0+1xN",
    _STEPS: "0+1xN",
    _STEP_SECONDS: "0+60xN",
    _WAIT_SECONDS: "0+20xN",
    _SYNC_SECONDS: "0+5xN",
    _CANARY_FAILURES: "0xN",
    _LEARNER_RESTARTS: "0xN",
    _MISMATCH: "0.001xN",
    _select_worker("version", 0): "0+1xN",
    _select_worker("version", 1): "0+1xN",
    _select_worker("hash", 0): "7+1xN",
    _select_worker("hash", 1): "7+1xN",
    _EPISODES: "0+100xN",
    select_environment_series("ludus_train_episodes_finished_total"): "0+100xN",
    select_environment_series("ludus_train_wins_total"): "0+40xN",
    select_environment_series("ludus_train_draws_total"): "0+10xN",
    select_environment_series("ludus_train_losses_total"): "0+50xN",
    _EPISODES_LOST: "0+1xN",
    _EPISODES_FAILED: "0+1xN",
    _GROUPS: "0+100xN",
    _ZERO_VARIANCE_GROUPS: "0+50xN",
    _select_win_rate("low"): "0.4xN",
    _select_win_rate("high"): "0.5xN",
}
"""Series of two gateways, a server and a run that trains one step per minute."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A condition, and the alert caused by the condition.

    Args:
        changes: series that differ from `HEALTHY_SERIES`.
        minute: a minute at which only this alert fires.
        labels: labels of the alert, in addition to the name and the severity.
        value: the value in the alert's annotations.
        silent_minute: a minute, before or after the alert, at which the alert does not fire.
    """

    alert: str
    changes: Mapping[str, str]
    minute: int
    labels: Labels
    value: str = ""
    silent_minute: int = 0


_NAMESPACE_LABELS = {"namespace": "ludus"}
_ENV_LABELS = {**_NAMESPACE_LABELS, "env": "blackjack"}
_RUN_LABELS = {**_NAMESPACE_LABELS, "run": "first"}
_RUN_ENV_LABELS = {**_RUN_LABELS, "environment": "blackjack"}
_JOB_LABELS = {**_NAMESPACE_LABELS, "name": "first"}

FLEET_SCENARIOS = (
    Scenario(
        "LudusGatewayMissing",
        {
            _select_build_info("gateway-1"): "1x20 stale",
            _select_build_info("gateway-2"): "1x22 stale",
        },
        minute=27,
        labels=_NAMESPACE_LABELS,
        silent_minute=24,
    ),
    Scenario(
        "LudusTargetDown",
        {_select_target_up("server-1", "environment"): "1x5 0xN"},
        minute=12,
        labels={**_NAMESPACE_LABELS, "job": "environment", "pod": "server-1", "release": "main"},
        silent_minute=8,
    ),
    Scenario(
        "LudusNoServers",
        {_select_sessions("pending"): "0x5 3xN", _select_servers("ready"): "0xN"},
        minute=10,
        labels=_ENV_LABELS,
        value="3",
        silent_minute=7,
    ),
    Scenario(
        "LudusFleetSaturated",
        {_select_sessions("active"): "95xN"},
        12,
        _ENV_LABELS,
        value="95%",
        silent_minute=8,
    ),
    Scenario(
        "LudusOpensWait",
        {_select_queue_wait_bucket("10.0"): "0xN"},
        8,
        _ENV_LABELS,
        value="19.5s",
        silent_minute=4,
    ),
    Scenario(
        "LudusOpensFail",
        {_select_opens("no_capacity"): "0+15xN"},
        8,
        _ENV_LABELS,
        value="20%",
        silent_minute=4,
    ),
    # Ten of 650 sessions are lost within ten minutes: 50 are open, and 600 were opened.
    Scenario(
        "LudusSessionsLost",
        {_SESSIONS_LOST: "0x9 0+1x10 10xN"},
        20,
        _ENV_LABELS,
        value="1.538%",
        silent_minute=60,
    ),
    Scenario(
        "LudusServersUnreachable",
        {_select_servers("unreachable"): "1xN"},
        6,
        _ENV_LABELS,
        value="1",
        silent_minute=3,
    ),
    Scenario(
        "LudusStepsSlow",
        {_select_step_time_bucket("5.0"): "0xN"},
        14,
        _ENV_LABELS,
        value="9.95s",
        silent_minute=9,
    ),
    Scenario(
        "LudusCallsFail",
        {_select_calls("UNAVAILABLE"): "0+100xN"},
        8,
        _ENV_LABELS,
        value="8.333%",
        silent_minute=4,
    ),
    Scenario(
        "LudusWorkersDie",
        {_WORKER_ENDS: "0+1xN"},
        minute=30,
        labels={**_NAMESPACE_LABELS, "pod": "server-1", "env": "openspiel_env"},
        value="15",
        silent_minute=3,
    ),
    Scenario(
        "LudusTokensRefused",
        {_AUTH_FAILURES: "0+120xN"},
        14,
        _NAMESPACE_LABELS,
        value="2",
        silent_minute=9,
    ),
)

PLATFORM_SCENARIOS = (
    Scenario(
        "LudusRunFailed", {_select_job("Failed"): "_x9 1xN"}, 12, _JOB_LABELS, silent_minute=85
    ),
    Scenario("LudusRunWaits", {_select_job("Suspended"): "1xN"}, 32, _JOB_LABELS, silent_minute=28),
    Scenario(
        "LudusHeadMemoryHigh",
        {_select_head_memory("used"): "9.5xN"},
        minute=7,
        labels={**_NAMESPACE_LABELS, "pod": "head-1"},
        value="95%",
        silent_minute=3,
    ),
)

TRAINING_SCENARIOS = (
    Scenario(
        "LudusTrainingStalled",
        {_LAST_STEP: "0+60x10 600xN", _STEPS: "0+1x10 10xN", _STEP_SECONDS: "0+60x10 600xN"},
        minute=27,
        labels=_RUN_LABELS,
        value="17m 0s",
        silent_minute=23,
    ),
    Scenario(
        "LudusRunNotTraining",
        {_select_phase("train"): "0xN", _select_phase("start_workers"): "1xN"},
        minute=40,
        labels=_RUN_LABELS,
        value="40m 0s",
        silent_minute=29,
    ),
    Scenario(
        "LudusEpisodesVoided",
        {_EPISODES_LOST: "0+3xN"},
        20,
        _RUN_ENV_LABELS,
        value="3%",
        silent_minute=4,
    ),
    Scenario(
        "LudusEpisodesFailed",
        {_EPISODES_FAILED: "0+3xN"},
        20,
        _RUN_ENV_LABELS,
        value="3%",
        silent_minute=4,
    ),
    Scenario(
        "LudusNoLearningSignal",
        {_ZERO_VARIANCE_GROUPS: "0+98xN"},
        40,
        _RUN_ENV_LABELS,
        value="98%",
        silent_minute=14,
    ),
    Scenario(
        "LudusEvaluationFell",
        {_select_win_rate("low"): "0.4x20 0.2xN", _select_win_rate("high"): "0.5x20 0.3xN"},
        minute=30,
        labels={**_RUN_ENV_LABELS, "opponent": "environment"},
        value="30%",
        silent_minute=23,
    ),
    Scenario(
        "LudusMismatchHigh", {_MISMATCH: "0.25xN"}, 15, _RUN_LABELS, value="0.25", silent_minute=8
    ),
    Scenario("LudusCanaryFailed", {_CANARY_FAILURES: "0x9 1xN"}, 11, _RUN_LABELS, silent_minute=60),
    Scenario(
        "LudusWeightsDiffer", {_select_worker("hash", 1): "8+1xN"}, 5, _RUN_LABELS, silent_minute=1
    ),
    Scenario(
        "LudusWeightSyncSlow",
        {_SYNC_SECONDS: "0+45xN"},
        15,
        _RUN_LABELS,
        value="75%",
        silent_minute=8,
    ),
    Scenario(
        "LudusLearnerRestarted", {_LEARNER_RESTARTS: "0x9 1xN"}, 20, _RUN_LABELS, silent_minute=60
    ),
    Scenario(
        "LudusCheckpointOld",
        {_LAST_CHECKPOINT: "0xN"},
        70,
        _RUN_LABELS,
        "1h 10m 0s",
        silent_minute=62,
    ),
    Scenario(
        "LudusLearnerIdle",
        {_WAIT_SECONDS: "0+54xN"},
        40,
        _RUN_LABELS,
        value="90%",
        silent_minute=29,
    ),
    Scenario(
        "LudusRunRetried",
        {_RUN_INFO: "1x20 stale", select_run_series("ludus_train_run", pod="head-2"): "_x20 1xN"},
        minute=30,
        labels=_RUN_LABELS,
        value="2",
        silent_minute=19,
    ),
)
SCENARIOS = (*FLEET_SCENARIOS, *PLATFORM_SCENARIOS, *TRAINING_SCENARIOS)

HARMLESS_CHANGES: dict[str, Mapping[str, str]] = {
    "a tenant's quota refuses opens": {_select_opens("rate_limited"): "0+60xN"},
    "a caller's actions are invalid": {_select_calls("VALIDATION_ERROR"): "0+900xN"},
    "no session is open and no server is ready": {
        _select_opens("opened"): "9xN",
        _select_calls("OK"): "9xN",
        _select_sessions("active"): "0xN",
        select_gateway_series("ludus_gateway_sessions", 'state="active"', pod="gateway-2"): "0xN",
        select_gateway_series("ludus_gateway_session_capacity"): "0xN",
        _select_servers("ready"): "0xN",
    },
    "a gateway is replaced": {
        _select_build_info("gateway-1"): "1x20 stale",
        _select_target_up("gateway-1", "gateway"): "1x20 stale",
        _select_build_info("gateway-3"): "_x21 1xN",
    },
    "a step takes 15 minutes": {
        _LAST_STEP: "0+0x15 900+0x15 1800+0x15 2700+0x15 3600+0x15 4500+0x15 5400+0xN",
        _STEPS: "1+0x15 2+0x15 3+0x15 4+0x15 5+0x15 6+0x15 7+0xN",
        _STEP_SECONDS: "900+0x15 1800+0x15 2700+0x15 3600+0x15 4500+0x15 5400+0x15 6300+0xN",
        select_run_series("ludus_train_step"): "1xN",
        _select_worker("version", 0): "1xN",
        _select_worker("version", 1): "1xN",
    },
    "an evaluation is slightly worse": {
        _select_win_rate("low"): "0.4x20 0.35xN",
        _select_win_rate("high"): "0.5x20 0.45xN",
    },
    "a run finishes successfully": {
        _select_phase("train"): "1x20 0xN",
        select_run_series("ludus_train_phase", 'phase="done"'): "0x20 1xN",
        _LAST_STEP: "0+60x20 1200xN",
        _LAST_CHECKPOINT: "0+60x20 1200xN",
        _select_job("Running"): "1x20 stale",
        _select_job("Complete"): "_x20 1xN",
    },
}
"""Changes that must not cause an alert."""
