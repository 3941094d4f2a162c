"""Series that Prometheus scrapes each minute: a healthy platform, and the cause of each alert.

Values are in promtool's notation: `0+6xN` is 0, 6, 12, ... for the N minutes of the scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Labels = Mapping[str, str]


def series(name: str, labels: str = "") -> str:
    """Return the selector of one series in the release's namespace."""
    return f'{name}{{namespace="ludus"{", " * bool(labels)}{labels}}}'


def gateway_series(name: str, labels: str = "", pod: str = "gateway-1") -> str:
    """Return the selector of a gateway's series of the environment."""
    return series(name, f'pod="{pod}", env="blackjack"{", " * bool(labels)}{labels}')


def run_series(name: str, labels: str = "", pod: str = "head-1") -> str:
    """Return the selector of a series of the whole run."""
    return series(name, f'pod="{pod}", run="first"{", " * bool(labels)}{labels}')


def environment_series(name: str, labels: str = "") -> str:
    """Return the selector of a series of the run's environment."""
    environment_labels = 'environment="blackjack", opponent="environment"'
    return run_series(name, f"{environment_labels}{', ' * bool(labels)}{labels}")


def _build_info(pod: str) -> str:
    return series("ludus_gateway_build_info", f'pod="{pod}"')


def _target_up(pod: str, job: str) -> str:
    return series("up", f'job="{job}", pod="{pod}", release="main"')


def _opens(outcome: str) -> str:
    return gateway_series("ludus_gateway_opens_total", f'outcome="{outcome}"')


def _calls(code: str) -> str:
    return gateway_series("ludus_gateway_calls_total", f'call="step", code="{code}"')


def _steps_bucket(le: str) -> str:
    return gateway_series("ludus_gateway_call_seconds_bucket", f'call="step", le="{le}"')


def _waits_bucket(le: str) -> str:
    return gateway_series("ludus_gateway_queue_wait_seconds_bucket", f'le="{le}"')


def _sessions(state: str) -> str:
    return gateway_series("ludus_gateway_sessions", f'state="{state}"')


def _servers(state: str) -> str:
    return gateway_series("ludus_gateway_servers", f'state="{state}"')


def _phase(phase: str) -> str:
    return run_series("ludus_train_phase", f'phase="{phase}"')


def _worker(name: str, worker: int) -> str:
    return run_series(f"ludus_train_worker_weights_{name}", f'worker="{worker}"')


def _win_rate(bound: str) -> str:
    return environment_series(f"ludus_train_eval_win_rate_ci95_{bound}", 'policy="trained"')


def _job(status: str) -> str:
    labels = f'name="first", deployment_status="{status}"'
    return series("kuberay_job_deployment_status", labels)


def _head_memory(quantity: str) -> str:
    return series(f"ray_node_mem_{quantity}", 'pod="head-1", IsHeadNode="true"')


_SESSIONS_LOST = gateway_series("ludus_gateway_sessions_lost_total")
_AUTH_FAILURES = series("ludus_gateway_auth_failures_total", 'pod="gateway-1", kind="expired"')
_WORKER_ENDS = series("env_server_worker_ends_total", 'pod="server-1", env="openspiel_env"')
_EPISODES = environment_series("ludus_train_episodes_total")
_EPISODES_LOST = environment_series("ludus_train_episodes_lost_total")
_EPISODES_FAILED = environment_series("ludus_train_episodes_failed_total")
_GROUPS = environment_series("ludus_train_groups_total")
_DEAD_GROUPS = environment_series("ludus_train_groups_dead_total")
_LAST_STEP = run_series("ludus_train_last_step_timestamp_seconds")
_LAST_CHECKPOINT = run_series("ludus_train_last_checkpoint_timestamp_seconds")
_PHASE_START = run_series("ludus_train_phase_start_timestamp_seconds")
_STEPS = run_series("ludus_train_steps_total")
_STEP_SECONDS = run_series("ludus_train_step_seconds_total")
_WAIT_SECONDS = run_series("ludus_train_wait_for_batch_seconds_total")
_SYNC_SECONDS = run_series("ludus_train_weight_sync_seconds_total")
_CANARY_FAILURES = run_series("ludus_train_canary_failures_total")
_LEARNER_RESTARTS = run_series("ludus_train_learner_restarts_total")
_MISMATCH = run_series("ludus_train_mismatch_kl")
_RUN_INFO = run_series("ludus_train_run")

HEALTHY_SERIES: dict[str, str] = {
    _build_info("gateway-1"): "1xN",
    _build_info("gateway-2"): "1xN",
    _target_up("gateway-1", "gateway"): "1xN",
    _target_up("server-1", "environment"): "1xN",
    _target_up("head-1", "trainer"): "1xN",
    _sessions("active"): "50xN",
    _sessions("pending"): "0xN",
    gateway_series("ludus_gateway_sessions", 'state="active"', pod="gateway-2"): "50xN",
    gateway_series("ludus_gateway_session_capacity"): "100xN",
    _servers("ready"): "2xN",
    _servers("unreachable"): "0xN",
    _opens("opened"): "0+60xN",
    _opens("no_capacity"): "0xN",
    _opens("rate_limited"): "0xN",
    _calls("OK"): "0+1000xN",
    _calls("UNAVAILABLE"): "0xN",
    _calls("VALIDATION_ERROR"): "0+100xN",
    _steps_bucket("5.0"): "0+1000xN",
    _steps_bucket("10.0"): "0+1000xN",
    _steps_bucket("+Inf"): "0+1000xN",
    _waits_bucket("10.0"): "0+60xN",
    _waits_bucket("20.0"): "0+60xN",
    _waits_bucket("+Inf"): "0+60xN",
    _SESSIONS_LOST: "0xN",
    _AUTH_FAILURES: "0+1xN",
    _WORKER_ENDS: "0xN",
    _job("Running"): "1xN",
    _head_memory("used"): "5xN",
    _head_memory("total"): "10xN",
    _RUN_INFO: "1xN",
    _phase("train"): "1xN",
    _phase("start_workers"): "0xN",
    _PHASE_START: "0xN",
    _LAST_STEP: "0+60xN",
    _LAST_CHECKPOINT: "0+60xN",
    run_series("ludus_train_step"): "0+1xN",
    _STEPS: "0+1xN",
    _STEP_SECONDS: "0+60xN",
    _WAIT_SECONDS: "0+20xN",
    _SYNC_SECONDS: "0+5xN",
    _CANARY_FAILURES: "0xN",
    _LEARNER_RESTARTS: "0xN",
    _MISMATCH: "0.001xN",
    _worker("version", 0): "0+1xN",
    _worker("version", 1): "0+1xN",
    _worker("hash", 0): "7+1xN",
    _worker("hash", 1): "7+1xN",
    _EPISODES: "0+100xN",
    environment_series("ludus_train_episodes_finished_total"): "0+100xN",
    environment_series("ludus_train_wins_total"): "0+40xN",
    environment_series("ludus_train_draws_total"): "0+10xN",
    environment_series("ludus_train_losses_total"): "0+50xN",
    _EPISODES_LOST: "0+1xN",
    _EPISODES_FAILED: "0+1xN",
    _GROUPS: "0+100xN",
    _DEAD_GROUPS: "0+50xN",
    _win_rate("low"): "0.4xN",
    _win_rate("high"): "0.5xN",
}
"""Series of two gateways, a server and a run that trains one step per minute."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A condition and the alert that it causes.

    Args:
        changes: series that differ from `CLEAN`.
        minute: a minute at which this alert fires and no other alert does.
        labels: labels of the alert, in addition to its name and its severity.
        value: the value that the annotations show.
        silent_minute: a minute at which the alert does not fire: not yet, or no longer.
    """

    alert: str
    changes: Mapping[str, str]
    minute: int
    labels: Labels
    value: str = ""
    silent_minute: int = 0


_NAMESPACE = {"namespace": "ludus"}
_ENV = {**_NAMESPACE, "env": "blackjack"}
_RUN_LABELS = {**_NAMESPACE, "run": "first"}
_RUN_ENV = {**_RUN_LABELS, "environment": "blackjack"}
_JOB_LABELS = {**_NAMESPACE, "name": "first"}

FLEET = (
    Scenario(
        "LudusGatewayMissing",
        {_build_info("gateway-1"): "1x20 stale", _build_info("gateway-2"): "1x22 stale"},
        minute=27,
        labels=_NAMESPACE,
        silent_minute=24,
    ),
    Scenario(
        "LudusTargetDown",
        {_target_up("server-1", "environment"): "1x5 0xN"},
        minute=12,
        labels={**_NAMESPACE, "job": "environment", "pod": "server-1", "release": "main"},
        silent_minute=8,
    ),
    Scenario(
        "LudusNoServers",
        {_sessions("pending"): "0x5 3xN", _servers("ready"): "0xN"},
        minute=10,
        labels=_ENV,
        value="3",
        silent_minute=7,
    ),
    Scenario(
        "LudusFleetSaturated", {_sessions("active"): "95xN"}, 12, _ENV, value="95%", silent_minute=8
    ),
    Scenario(
        "LudusOpensWait", {_waits_bucket("10.0"): "0xN"}, 8, _ENV, value="19.5s", silent_minute=4
    ),
    Scenario(
        "LudusOpensFail", {_opens("no_capacity"): "0+15xN"}, 8, _ENV, value="20%", silent_minute=4
    ),
    # 10 within ten minutes; 50 sessions are open and 600 were opened.
    Scenario(
        "LudusSessionsLost",
        {_SESSIONS_LOST: "0x9 0+1x10 10xN"},
        20,
        _ENV,
        value="1.538%",
        silent_minute=60,
    ),
    Scenario(
        "LudusServersUnreachable",
        {_servers("unreachable"): "1xN"},
        6,
        _ENV,
        value="1",
        silent_minute=3,
    ),
    Scenario(
        "LudusStepsSlow", {_steps_bucket("5.0"): "0xN"}, 14, _ENV, value="9.95s", silent_minute=9
    ),
    Scenario(
        "LudusCallsFail",
        {_calls("UNAVAILABLE"): "0+100xN"},
        8,
        _ENV,
        value="8.333%",
        silent_minute=4,
    ),
    Scenario(
        "LudusWorkersDie",
        {_WORKER_ENDS: "0+1xN"},
        minute=30,
        labels={**_NAMESPACE, "pod": "server-1", "env": "openspiel_env"},
        value="15",
        silent_minute=3,
    ),
    Scenario(
        "LudusTokensRefused",
        {_AUTH_FAILURES: "0+120xN"},
        14,
        _NAMESPACE,
        value="2",
        silent_minute=9,
    ),
)

PLATFORM = (
    Scenario("LudusRunFailed", {_job("Failed"): "_x9 1xN"}, 12, _JOB_LABELS, silent_minute=85),
    Scenario("LudusRunWaits", {_job("Suspended"): "1xN"}, 32, _JOB_LABELS, silent_minute=28),
    Scenario(
        "LudusHeadMemoryHigh",
        {_head_memory("used"): "9.5xN"},
        minute=7,
        labels={**_NAMESPACE, "pod": "head-1"},
        value="95%",
        silent_minute=3,
    ),
)

TRAINING = (
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
        {_phase("train"): "0xN", _phase("start_workers"): "1xN"},
        minute=40,
        labels=_RUN_LABELS,
        value="40m 0s",
        silent_minute=29,
    ),
    Scenario(
        "LudusEpisodesVoided", {_EPISODES_LOST: "0+3xN"}, 20, _RUN_ENV, value="3%", silent_minute=4
    ),
    Scenario(
        "LudusEpisodesFailed",
        {_EPISODES_FAILED: "0+3xN"},
        20,
        _RUN_ENV,
        value="3%",
        silent_minute=4,
    ),
    Scenario(
        "LudusNoLearningSignal",
        {_DEAD_GROUPS: "0+98xN"},
        40,
        _RUN_ENV,
        value="98%",
        silent_minute=14,
    ),
    Scenario(
        "LudusEvaluationFell",
        {_win_rate("low"): "0.4x20 0.2xN", _win_rate("high"): "0.5x20 0.3xN"},
        minute=30,
        labels={**_RUN_ENV, "opponent": "environment"},
        value="30%",
        silent_minute=23,
    ),
    Scenario(
        "LudusMismatchHigh", {_MISMATCH: "0.25xN"}, 15, _RUN_LABELS, value="0.25", silent_minute=8
    ),
    Scenario("LudusCanaryFailed", {_CANARY_FAILURES: "0x9 1xN"}, 11, _RUN_LABELS, silent_minute=60),
    Scenario("LudusWeightsDiffer", {_worker("hash", 1): "8+1xN"}, 5, _RUN_LABELS, silent_minute=1),
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
        {_RUN_INFO: "1x20 stale", run_series("ludus_train_run", pod="head-2"): "_x20 1xN"},
        minute=30,
        labels=_RUN_LABELS,
        value="2",
        silent_minute=19,
    ),
)
SCENARIOS = (*FLEET, *PLATFORM, *TRAINING)

HARMLESS_CHANGES: dict[str, Mapping[str, str]] = {
    "a tenant's quota refuses opens": {_opens("rate_limited"): "0+60xN"},
    "a caller's actions are invalid": {_calls("VALIDATION_ERROR"): "0+900xN"},
    "no session is open, and no server runs": {
        _opens("opened"): "9xN",
        _calls("OK"): "9xN",
        _sessions("active"): "0xN",
        gateway_series("ludus_gateway_sessions", 'state="active"', pod="gateway-2"): "0xN",
        gateway_series("ludus_gateway_session_capacity"): "0xN",
        _servers("ready"): "0xN",
    },
    "a gateway is replaced": {
        _build_info("gateway-1"): "1x20 stale",
        _target_up("gateway-1", "gateway"): "1x20 stale",
        _build_info("gateway-3"): "_x21 1xN",
    },
    "a step takes a quarter of an hour": {
        _LAST_STEP: "0+0x15 900+0x15 1800+0x15 2700+0x15 3600+0x15 4500+0x15 5400+0xN",
        _STEPS: "1+0x15 2+0x15 3+0x15 4+0x15 5+0x15 6+0x15 7+0xN",
        _STEP_SECONDS: "900+0x15 1800+0x15 2700+0x15 3600+0x15 4500+0x15 5400+0x15 6300+0xN",
        run_series("ludus_train_step"): "1xN",
        _worker("version", 0): "1xN",
        _worker("version", 1): "1xN",
    },
    "an evaluation is a little worse": {
        _win_rate("low"): "0.4x20 0.35xN",
        _win_rate("high"): "0.5x20 0.45xN",
    },
    "a run has ended well": {
        _phase("train"): "1x20 0xN",
        run_series("ludus_train_phase", 'phase="done"'): "0x20 1xN",
        _LAST_STEP: "0+60x20 1200xN",
        _LAST_CHECKPOINT: "0+60x20 1200xN",
        _job("Running"): "1x20 stale",
        _job("Complete"): "_x20 1xN",
    },
}
"""Changes that must not cause an alert."""
