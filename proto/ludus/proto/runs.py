"""What a run leaves in its folder, and the types of these files.

runs/<name>/
    config.json      the resolved run configuration
    metrics.jsonl    MetricsRow, one a line, in the order of time
    transcripts.jsonl  Transcript, one a line: episodes that were trained on, word for word
    summary.json     Summary
    eval.json        Evaluation, made by `ludus eval`
    chart.json       PolicyChart, when the environment offers a policy chart
    report.html      made from the files above
    tensorboard/     event files, when metrics.tensorboard is set
    wandb/           what `wandb sync` sends, when metrics.wandb is set
    control.json     RunControl: what the user wants changed while the run continues
    run-id           tells its weights from those of another run of the same name
    trainer.log      what the trainer's driver logged
    environment.log  what the environment server that the run started logged; with several
                     environments each has its own, environment-<name>.log
    checkpoints/     step-<n>/, newest last
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
TRANSCRIPTS_FILE = "transcripts.jsonl"
SUMMARY_FILE = "summary.json"
EVAL_FILE = "eval.json"
CHART_FILE = "chart.json"
REPORT_FILE = "report.html"
CONTROL_FILE = "control.json"
LOG_FILE = "trainer.log"
RUN_ID_FILE = "run-id"
ENVIRONMENT_LOG_FILE = "environment.log"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"

NETWORK = "network"
"""Stands for the generator of a run that trains a network: none samples text."""
LOG_ROW_PREFIX = "row: "
"""Begins the lines of a job's log that hold a MetricsRow: of a run in a cluster, that log may be
all that is seen while it continues."""
CONTROL_VARIABLE = "LUDUS_CONTROL_FILE"
"""Environment variable with a second control file, one that is mounted into a pod."""


class Resume(StrEnum):
    """Whether a run continues from its newest checkpoint."""

    NEVER = "never"
    AUTO = "auto"
    """Where there is one; where there is none, it begins anew."""
    ALWAYS = "always"
    """A run without one is refused."""


class Phase(StrEnum):
    """What a run is doing; shown live."""

    START_ENVIRONMENT = "start_environment"
    PREPARE_MODEL = "prepare_model"
    START_WORKERS = "start_workers"
    EVALUATE = "evaluate"
    TRAIN = "train"
    SAVE_CHECKPOINT = "save_checkpoint"
    DONE = "done"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


RecordT = TypeVar("RecordT", bound=_Record)
RowKind = Literal["phase", "train", "environment", "eval", "baseline", "weights", "event"]


class HeldWeights(_Record):
    """What one rollout worker samples from."""

    worker: int
    version: int
    content_hash: str
    canary_error: float
    """Difference of its canary log-probs from the learner's, in nats, as `weights.canary` says."""


class RunControl(_Record):
    """What the user wants changed while a run continues; the driver reads it each second."""

    num_workers: Annotated[int, Field(ge=1)] | None = None
    """Rollout workers; null leaves their number as it is."""
    stop: bool = False
    """Whether the run shall end after its step, with a checkpoint and exit code 0."""


class MetricsRow(_Record):
    """One line of metrics.jsonl.

    kind         environment  values
    phase        -            none: `phase` says what the run turns to
    train        -            TrainMetric of a step, the whole run
    environment  its name     TrainMetric of a step, as far as one environment has its own
    eval         its name     EvalMetric of the trained policy
    baseline     its name     EvalMetric of the fixed policy `policy`, on the same seeds
    weights      -            TrainMetric of a delivery; `weights` says what every worker holds
    event        its name, -  TrainMetric that counts what happened just now, in an environment
                              or to the run
    """

    kind: RowKind
    step: int
    """Optimizer batches done; 0 before the first."""
    environment: str | None = None
    """Its name in the run."""
    policy: str | None = None
    """Name of the fixed policy."""
    phase: Phase | None = None
    """What the run turns to now."""
    num_steps: int | None = None
    """Of the whole run; in rows of a phase, once it is known."""
    weights: tuple[HeldWeights, ...] = ()
    elapsed_s: float
    """Seconds of training so far; evaluations do not count."""
    num_games_trained: int
    """Episodes whose gradients were taken so far; 0 in rows that do not say it."""
    values: dict[str, float] = {}
    """By TrainMetric or EvalMetric, and by reward term (`REWARD_TERM_PREFIX`); a value that
    could not be had is left out."""


class Said(_Record):
    """One message of a conversation."""

    role: str
    text: str


class TranscriptTurn(_Record):
    """What the policy was shown, what it answered, and what came of it."""

    shown: tuple[Said, ...]
    """Since the turn before."""
    answer: str
    """What it sampled, thoughts and all."""
    action: JsonValue = None
    """What the environment was asked to do: an action, a text that it parses itself, or calls of
    tools; null where the answer was none of these."""
    reward: float
    """What the environment paid for it."""


class Transcript(_Record):
    """One line of transcripts.jsonl: an episode that was trained on.

    Long texts are cut, and say so; turns past a limit are counted alone.
    """

    step: int
    """The training step that learned from it."""
    environment: str
    """Its name in the run."""
    group: int
    """Counts the groups of a run; episodes of one group compare with each other."""
    episode: int
    """Its place in the group."""
    seed: int
    policy_version: int
    """Oldest version of the weights that said any of it."""
    status: str
    """How it ended: terminated, truncated, invalid_action, lost or failed."""
    reward: float | None
    """What was learned from: the weighted sum of the terms; null = it could not be scored."""
    episode_return: float | None
    """What the environment paid in all."""
    terms: dict[str, float | None]
    """The terms of the reward by name, before their weights."""
    failure: str = ""
    """What made it void, or a term of its reward unknown; empty where nothing failed."""
    turns: tuple[TranscriptTurn, ...]
    """None where it failed before it began, or was still played when its time was up."""
    num_turns_left_out: int = 0
    """Turns that followed."""


class PolicyResult(_Record):
    """How one policy did on the evaluation's seeds."""

    num_games: int
    win_rate: float | None
    """Share of games that succeeded, or were won; None where the environment never said so."""
    win_rate_ci95: tuple[float, float] | None
    """Wilson interval."""
    draw_rate: float | None
    """Share of games without success and with a return of 0; None as for the win rate."""
    expected_return: float
    expected_return_ci95: tuple[float, float]
    """Normal interval of the mean."""
    invalid_rate: float = 0.0
    """Share of episodes that ended because the text was no action."""
    num_void: int = 0
    """Games that failed, beside those that count."""


class EvalReport(_Record):
    """A policy and the fixed policies, judged on the same seeds."""

    policy: PolicyResult
    baselines: dict[str, PolicyResult]
    temperature: float
    gap_closed: float | None
    """Share of the gap from the random to the optimal policy; None where those are not named."""
    gap_closed_ci95: tuple[float, float] | None
    """Interval from the paired differences on these seeds."""


class Evaluation(_Record):
    """A policy, judged in every environment of its run."""

    environments: dict[str, EvalReport]
    """By the environment's name in the run."""


class EnvironmentResult(_Record):
    """What a run came to in one of its environments."""

    environment: str
    """Name of the environment and what it was built with."""
    start: PolicyResult | None
    """The policy before training."""
    report: EvalReport
    """The policy after training."""


class Summary(_Record):
    """What a run came to; the figures of one policy are those of the first environment."""

    name: str
    environment: str
    """Name of the first environment and what it was built with."""
    results: dict[str, EnvironmentResult]
    """Every environment, by its name in the run."""
    finished: bool
    """False when the run was stopped before its last step."""
    seed: int
    num_steps: int
    generator: str
    num_learner_ranks: int
    num_rollout_workers: int
    win_rate: float | None
    """None where the environment never said whether a game succeeded."""
    win_rate_ci95: tuple[float, float] | None
    draw_rate: float | None
    expected_return: float
    expected_return_ci95: tuple[float, float]
    invalid_rate: float
    gap_closed: float | None
    """Share of the gap from the random to the optimal policy, on the same seeds."""
    gap_closed_ci95: tuple[float, float] | None
    """Interval from the paired differences on these seeds."""
    eval_num_games: int
    eval_temperature: float
    start: PolicyResult | None
    """The policy before training."""
    baselines: dict[str, PolicyResult]
    games_trained: int
    games_played: int
    episodes_lost: int
    """Episodes that infrastructure voided: counted, never trained on."""
    episodes_failed: int = 0
    """Episodes that code voided, the environment's, the engine's or the run's own: the same."""
    wall_seconds_training: float
    wall_seconds_total: float
    weight_syncs: int
    canary_failures: int
    canary_max_error: float
    """Largest difference of a worker's canary log-probs from the learner's that passed."""
    environment_restarts: int
    learner_restarts: int
    """Times the learner's ranks were restarted, since one of them died."""
    groups_rolled_back: int
    """Groups that were lost with a learner: trained on, waiting or played, and then void."""
    max_staleness_seen: int
    versions: dict[str, str]
    """Packages that decide the result."""


class ChartCell(_Record):
    """What the policy does in one situation."""

    panel: str
    row: str
    column: str
    probabilities: tuple[float, ...]
    """In the order of PolicyChart.answers."""
    reference: str
    """The best answer known."""


class PolicyChart(_Record):
    """The policy in every situation that an environment's policy chart names."""

    environment: str
    """Its name in the run."""
    answers: tuple[str, ...]
    cells: tuple[ChartCell, ...]


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """The rows of a run's metrics.jsonl; a last line cut off by a crash is left out."""
    return _read_lines(run_dir / METRICS_FILE, MetricsRow)


def read_transcripts(run_dir: Path) -> list[Transcript]:
    """The lines of a run's transcripts.jsonl; a last one cut off by a crash is left out."""
    return _read_lines(run_dir / TRANSCRIPTS_FILE, Transcript)


def _read_lines(path: Path, record: type[RecordT]) -> list[RecordT]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [record.model_validate_json(line) for line in lines[:-1]]
