"""The files in a run folder, and their types.

runs/<name>/
    config.json      the resolved run configuration
    chat_template.jinja  copy of model.chat_template, if it is set
    metrics.jsonl    one MetricsRow per line, in chronological order
    transcripts.jsonl  one Transcript per line: episodes that were trained on
    samples.jsonl    one Transcript per line: the same held-back episodes before and after training
    trace.jsonl      one StepTrace per training step: when learner, weights and workers were busy
    summary.json     Summary, or SftSummary
    eval.json        Evaluation, written by `ludus eval`
    chart.json       PolicyChart, if an environment has a policy chart
    report.html      report about the files above
    tensorboard/     event files, if metrics.tensorboard is set
    wandb/           files for `wandb sync`, if metrics.wandb is set
    control.json     RunControl: requests to the running driver
    run-id           distinguishes runs with the same name in weight stores
    trainer.log      log of the driver
    environment.log  log of the environment server that the run started; with several
                     environments, environment-<name>.log
    checkpoints/     step-<n>/
    initial_model/   the model from which a tiny model's run started
    model/           fine-tuned model of a run of `ludus sft`, in the format of Hugging Face
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

CONFIG_FILE = "config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
METRICS_FILE = "metrics.jsonl"
TRANSCRIPTS_FILE = "transcripts.jsonl"
SAMPLES_FILE = "samples.jsonl"
TRACE_FILE = "trace.jsonl"
SUMMARY_FILE = "summary.json"
EVAL_FILE = "eval.json"
CHART_FILE = "chart.json"
REPORT_FILE = "report.html"
CONTROL_FILE = "control.json"
LOG_FILE = "trainer.log"
RUN_ID_FILE = "run-id"
ENVIRONMENT_LOG_FILE = "environment.log"
CHECKPOINTS_FOLDER = "checkpoints"
INITIAL_MODEL_FOLDER = "initial_model"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"

NETWORK = "network"
"""Value of Summary.generator for network runs, which have no generator."""
LOG_ROW_PREFIX = "row: "
"""Prefix of log lines with a MetricsRow. In a cluster, the log may be the only readable file of a
running job."""
RESOLVED_PREFIX = "resolved: "
"""Prefix of the line with the configuration that a check of a run has resolved."""
MODEL_SIZE_PREFIX = "model size: "
"""Prefix of the line with the ModelSize that a check of a run has measured."""
STEP_TIME_PREFIX = "step time: "
"""Prefix of the line with the seconds of a training step that a check of a run has measured."""
MAX_MEASURED_STEP_S = 3.0
"""Longest training step that a dry run measures, in seconds."""
CONTROL_VARIABLE = "LUDUS_CONTROL_FILE"
"""Environment variable with the path of a second control file, which is mounted into a pod."""


class Resume(StrEnum):
    """Use of the latest checkpoint when a run starts."""

    NEVER = "never"
    AUTO = "auto"
    """Resume if there is a checkpoint, otherwise start from the beginning."""
    ALWAYS = "always"
    """Resume; fail if there is no checkpoint."""


class Phase(StrEnum):
    """Current activity of a run."""

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


class WorkerWeightsRow(_Record):
    """Weights of one rollout worker."""

    worker: int
    version: int
    content_hash: str
    canary_error: float
    """Difference of its canary log-probs from the learner's, in nats; see `weights.canary`."""


class ModelSize(_Record):
    """Number of parameters of a language model."""

    num_parameters: int
    num_trained: int
    """Number of parameters that training changes: with LoRA, those of the adapters."""


class RunControl(_Record):
    """Requests of the user to a running driver, which reads them every second."""

    num_workers: Annotated[int, Field(ge=1)] | None = None
    """Number of rollout workers. null does not change it."""
    stop: bool = False
    """Stop the run after its current step, with a checkpoint and exit code 0."""


class MetricsRow(_Record):
    """One line of metrics.jsonl.

    kind         environment  values
    phase        -            none: `phase` is the new phase of the run
    train        -            TrainMetric of a step, for the whole run
    environment  name         TrainMetric of a step, for one environment
    eval         name         EvalMetric of the trained policy
    baseline     name         EvalMetric of the fixed policy `policy`, on the same seeds
    weights      -            TrainMetric of a delivery; `weights` lists the workers' weights
    event        name or -    TrainMetric that counts an event of an environment or of the run, or
                              the result of a validation
    """

    kind: RowKind
    step: int
    """Number of training steps so far."""
    environment: str | None = None
    """Name of the environment in the run."""
    policy: str | None = None
    """Name of the fixed policy."""
    is_game: bool = True
    """False if the environment has tasks, which are solved, not games, which are won; see
    `wording`. True in rows without an environment, and in those of earlier versions."""
    phase: Phase | None = None
    """New phase of the run."""
    num_steps: int | None = None
    """Number of steps of the whole run, in phase rows, if it is known."""
    weights: tuple[WorkerWeightsRow, ...] = ()
    elapsed_s: float
    """Training time so far in seconds, without evaluations."""
    num_games_trained: int
    """Number of episodes that were trained on so far; of conversations in a fine-tuning run. 0 in
    rows without this value."""
    values: dict[str, float] = {}
    """Values by TrainMetric, EvalMetric or reward term (`REWARD_TERM_PREFIX`). Values that were not
    measured are missing."""


class TranscriptMessage(_Record):
    """One message of a conversation."""

    role: str
    text: str


class TranscriptTurn(_Record):
    """One turn: new messages, completion, action and reward."""

    shown: tuple[TranscriptMessage, ...]
    """Messages since the previous turn."""
    answer: str
    """Text of the completion, including its reasoning."""
    action: JsonValue = None
    """Input of the step: an action, a text that the environment parses, or tool calls. null if the
    completion is not a valid action."""
    reward: float
    """Reward of the step."""


class Transcript(_Record):
    """One line of transcripts.jsonl or samples.jsonl: an episode.

    Long texts are cut and marked. Turns beyond a limit are only counted.
    """

    step: int
    """Training step that used the episode, or for samples.jsonl the last step before it."""
    environment: str
    """Name of the environment in the run."""
    group: int
    """Index of the group in the run."""
    episode: int
    """Index of the episode in the group."""
    seed: int
    policy_version: int
    """Oldest policy version that sampled a part of the episode."""
    status: str
    """Final status: terminated, truncated, invalid_action, lost or failed."""
    reward: float | None
    """Weighted sum of the terms; null if the episode has no reward."""
    episode_return: float | None
    """Sum of the rewards of all steps."""
    success: bool | None = None
    """Success as the environment reports it; null if it reports nothing."""
    terms: dict[str, float | None]
    """Reward terms by name, without their weights."""
    failure: str = ""
    """Reason why the episode is void or a reward term is missing; empty without a failure."""
    turns: tuple[TranscriptTurn, ...]
    """Turns of the episode. Empty if it failed before its first turn or exceeded its time."""
    num_turns_left_out: int = 0
    """Number of further turns, which are not recorded."""
    unanswered: tuple[TranscriptMessage, ...] = ()
    """Messages after the last completion, such as the result of a tool call that ended the
    episode. The policy has not seen them."""


Seconds = Annotated[float, AfterValidator(lambda value: round(value, 3))]
"""Time in seconds, rounded to milliseconds."""


class Span(_Record):
    """A period of Unix time."""

    start_s: Seconds
    end_s: Seconds

    @property
    def duration_s(self) -> float:
        """Length of the period."""
        return self.end_s - self.start_s


class PlaySpan(Span):
    """The period in which a worker played groups of one call."""

    worker: int
    num_groups: int
    num_refused: int = 0
    """Number of these groups that are not trained on and are replaced."""


class DeliverySpan(Span):
    """The period in which all workers loaded a version of the weights."""

    version: int


class StepTrace(_Record):
    """One line of trace.jsonl: a training step, and what ended since the step before."""

    step: int
    end_s: Seconds
    """End of the step, in Unix time."""
    wait_s: Seconds
    """Time for which the learner waited for the batch, at the start of the step."""
    train_s: Seconds
    """Time of training, after the wait."""
    publish_s: Seconds
    """Time of publishing the new weights, after training."""
    plays: tuple[PlaySpan, ...] = ()
    """Calls of workers, of which the longest are kept if there are many."""
    deliveries: tuple[DeliverySpan, ...] = ()

    @property
    def start_s(self) -> float:
        """Start of the step, in Unix time."""
        return self.end_s - self.wait_s - self.train_s - self.publish_s

    @property
    def duration_s(self) -> float:
        """Length of the step."""
        return self.end_s - self.start_s


class PolicyResult(_Record):
    """Results of one policy on the seeds of an evaluation.

    Intervals are over tasks: episodes of the same task are not independent.
    """

    num_games: int
    """Number of episodes with a result."""
    num_tasks: int | None = None
    """Number of different tasks in these episodes; null in results of earlier versions."""
    win_rate: float | None
    """Share of episodes with success; None if the environment never reported it."""
    win_rate_ci95: tuple[float, float] | None
    """Wilson interval of the effective number of independent episodes."""
    draw_rate: float | None
    """Share of episodes without success and with a return of 0; None if win_rate is None."""
    expected_return: float
    expected_return_ci95: tuple[float, float]
    """Student's interval of the mean."""
    invalid_rate: float = 0.0
    """Share of episodes that ended with text that is not an action."""
    num_void: int = 0
    """Number of void episodes, which are not in num_games."""


class EvalReport(_Record):
    """Results of a policy and of the baselines, on the same seeds."""

    policy: PolicyResult
    baselines: dict[str, PolicyResult]
    temperature: float
    gap_closed: float | None
    """Share of the gap between the random and the optimal policy that is closed; None if the run
    does not name these policies."""
    gap_closed_ci95: tuple[float, float] | None
    """Interval of the paired differences on these seeds."""
    num_games_requested: int | None = None
    """Number of episodes that were asked for, if fewer were played because of the number of tasks
    (`eval.max_games_per_task`). null if all were played."""
    is_game: bool = True
    """False if the environment has tasks, which are solved, not games, which are won; see
    `wording`. True in results of earlier versions."""


class Evaluation(_Record):
    """Results of a policy in every environment of its run."""

    environments: dict[str, EvalReport]
    """Reports by the name of the environment in the run."""


class EnvironmentResult(_Record):
    """Results of a run in one of its environments."""

    environment: str
    """Name and options of the environment."""
    start: PolicyResult | None
    """Results of the policy before training."""
    report: EvalReport
    """Results of the policy after training."""


class Summary(_Record):
    """Final results of a run. Single numbers are those of the first environment."""

    name: str
    environment: str
    """Name and options of the first environment."""
    results: dict[str, EnvironmentResult]
    """Results by the name of the environment in the run."""
    finished: bool
    """False when the run was stopped before its last step."""
    seed: int
    num_steps: int
    generator: str
    num_learner_ranks: int
    num_rollout_workers: int
    win_rate: float | None
    """Share of episodes with success; None if the environment never reported it."""
    win_rate_ci95: tuple[float, float] | None
    draw_rate: float | None
    expected_return: float
    expected_return_ci95: tuple[float, float]
    invalid_rate: float
    gap_closed: float | None
    """Share of the gap between the random and the optimal policy that is closed."""
    gap_closed_ci95: tuple[float, float] | None
    """Interval of the paired differences on these seeds."""
    eval_num_games: int
    eval_temperature: float
    start: PolicyResult | None
    """Results of the policy before training."""
    baselines: dict[str, PolicyResult]
    games_trained: int
    games_played: int
    episodes_lost: int = 0
    """Number of episodes that the infrastructure ended. They are not trained on."""
    episodes_failed: int = 0
    """Number of episodes in which code raised an error. They are not trained on."""
    wall_seconds_training: float
    wall_seconds_total: float
    weight_syncs: int = 0
    canary_failures: int = 0
    canary_max_error: float = 0.0
    """Largest difference of a worker's canary log-probs from the learner's that was accepted."""
    environment_restarts: int = 0
    learner_restarts: int = 0
    """Number of restarts of the learner's ranks after one died."""
    groups_rolled_back: int = 0
    """Number of groups that were lost when the learner died."""
    max_staleness_seen: int = 0
    versions: dict[str, str]
    """Versions of the packages that influence the result."""


class SftSummary(_Record):
    """Final results of a fine-tuning run: its summary.json. Losses are means per trained token."""

    kind: Literal["sft"] = "sft"
    name: str
    model: str
    """Path or Hugging Face id of the initial model."""
    data: str
    """Path or Hugging Face id of the conversations."""
    model_folder: str
    """Folder of the fine-tuned model."""
    seed: int
    num_steps: int
    """Number of trained steps."""
    has_stopped_early: bool
    """True if training stopped because the validation loss no longer improved."""
    model_step: int
    """Step of the weights in the model's folder."""
    num_train: int
    """Number of conversations that the model learned from."""
    num_validation: int
    """Number of held-out conversations."""
    num_dropped: int
    """Number of conversations that were left out, because they are too long."""
    num_truncated: int
    """Number of conversations that were cut off."""
    num_conversations_trained: int
    """Number of conversations in all batches; each pass counts."""
    num_tokens_trained: int
    """Number of trained tokens in all batches."""
    num_skipped_updates: int
    """Number of updates that were skipped because their gradient was not finite."""
    num_learner_ranks: int
    start_loss: float | None
    """Validation loss before training; None without validation."""
    validation_loss: float | None
    """Validation loss after the last step."""
    best_loss: float | None
    """Lowest validation loss after a step."""
    wall_seconds_training: float
    wall_seconds_total: float
    versions: dict[str, str]
    """Versions of the packages that influence the result."""

    @property
    def kept_loss(self) -> float | None:
        """Validation loss of the weights in the model's folder; None without validation."""
        return self.validation_loss if self.model_step == self.num_steps else self.best_loss


class ChartCell(_Record):
    """Action probabilities of the policy in one situation."""

    panel: str
    row: str
    column: str
    probabilities: tuple[float, ...]
    """Probabilities in the order of PolicyChart.answers."""
    reference: str
    """Best known answer."""


class PolicyChart(_Record):
    """Action probabilities of the policy in every situation of an environment's policy chart."""

    environment: str
    """Name of the environment in the run."""
    answers: tuple[str, ...]
    cells: tuple[ChartCell, ...]


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """Return the rows of a run's metrics.jsonl, without an incomplete last line."""
    return _read_lines(run_dir / METRICS_FILE, MetricsRow)


def read_transcripts(run_dir: Path) -> list[Transcript]:
    """Return the records of a run's transcripts.jsonl, without an incomplete last line."""
    return _read_lines(run_dir / TRANSCRIPTS_FILE, Transcript)


def read_samples(run_dir: Path) -> list[Transcript]:
    """Return the records of a run's samples.jsonl, without an incomplete last line."""
    return _read_lines(run_dir / SAMPLES_FILE, Transcript)


def read_traces(run_dir: Path) -> list[StepTrace]:
    """Return the records of a run's trace.jsonl, without an incomplete last line."""
    return _read_lines(run_dir / TRACE_FILE, StepTrace)


def _read_lines(path: Path, record_type: type[RecordT]) -> list[RecordT]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [record_type.model_validate_json(line) for line in lines[:-1]]
