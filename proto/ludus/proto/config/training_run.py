"""The sections that all kinds of runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, StringConstraints, field_validator, model_validator

from ludus.proto.config.environment import make_environment_name
from ludus.proto.config.section import (
    MIN_TEMPERATURE,
    RUN_NAME_PATTERN,
    LogLevel,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
)
from ludus.proto.paths import PathText
from ludus.proto.seeds import FIRST_EVAL_SEED

DEFAULT_CHECKPOINT_INTERVAL_S = 120.0
DEFAULT_STOP_GRACE_S = 10.0
_LAST_EVAL_SEED = 2**63


class TrainingLength(Section):
    """Length of the training, and its checkpoints."""

    num_steps: PositiveInt = 100
    """Number of training steps."""
    checkpoint_every_steps: PositiveInt = 50
    """Number of steps between checkpoints. An evaluation that is better than those of all
    checkpoints, the end of training, Ctrl-C and a failure write a checkpoint too."""
    checkpoint_every_s: PositiveFloat | None = DEFAULT_CHECKPOINT_INTERVAL_S
    """Maximum time between checkpoints in seconds: a step ends with a checkpoint if the next step
    would end later. If checkpoints are slow, the time is longer, so that they take at most a
    twentieth of the run. null sets no time."""
    stop_grace_s: NonNegativeFloat = DEFAULT_STOP_GRACE_S
    """Time that a step has to finish after a stop is requested. A longer step is abandoned, and a
    resumed run trains it again."""
    keep_checkpoints: PositiveInt = 2
    """Number of latest checkpoints that stay on disk. The checkpoint with the best evaluation stays
    too."""


class TrainingSection(TrainingLength):
    """Length of the training of a policy, and its checkpoints."""

    shuffle_rewards: bool = False
    """Shuffle the rewards of each batch, so that the policy cannot learn: a negative control."""


class EvalSection(Section):
    """Evaluations of the policy, on seeds that training never uses."""

    num_games: PositiveInt
    """Number of episodes in the evaluation after the last step."""
    num_games_during: NonNegativeInt
    """Number of episodes in each evaluation before and during training; 0 turns these
    evaluations off."""
    every_steps: PositiveInt = 20
    """Number of training steps between evaluations."""
    temperature: NonNegativeFloat
    """Sampling temperature. 0 always takes the most probable action; 1 plays the policy as it is
    trained."""
    seed: int = FIRST_EVAL_SEED
    """First seed of the evaluation, at least 2**31. Training and the warm start use
    smaller seeds."""

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, seed: int) -> int:
        if seed < FIRST_EVAL_SEED:
            raise ValueError(
                f"expected at least {FIRST_EVAL_SEED} (2**31), got {seed}; training and the warm "
                "start use smaller seeds, and an evaluation needs episodes that the policy has "
                "never seen"
            )
        if seed > _LAST_EVAL_SEED:
            raise ValueError(
                f"expected at most {_LAST_EVAL_SEED} (2**63), got {seed}; servers accept seeds of "
                "64 bits, and later episodes use larger seeds"
            )
        return seed

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"expected 0 (the most probable token) or at least {MIN_TEMPERATURE:g}, got "
                f"{temperature:g}"
            )
        return temperature


class PrometheusSink(Section):
    """Metrics for Prometheus, served by the run's driver. `true` takes the defaults."""

    port: Port = 0
    """Port of /metrics. 0 takes a free port, which trainer.log reports."""
    host: str = "127.0.0.1"
    """Address to listen on. Use 0.0.0.0 in a cluster, with a network policy that restricts
    access."""


class WandbSink(Section):
    """Metrics for Weights & Biases; the key comes from WANDB_API_KEY. `true` takes the defaults."""

    project: str = "ludus"
    """Project of the run."""
    entity: str | None = None
    """Team or user. null takes the owner of the API key."""
    mode: Literal["online", "offline"] = "online"
    """Connection mode. "offline" writes to the run folder; send the files later with
    `wandb sync`."""


def _read_switch(section: Any) -> Any:
    """Return the default section for true, and no section for false."""
    return ({} if section else None) if isinstance(section, bool) else section


_SWITCH = BeforeValidator(_read_switch)


class MetricsConfig(Section):
    """Metric sinks in addition to metrics.jsonl, and the number of recorded transcripts."""

    transcripts_per_step: NonNegativeInt = 4
    """Number of episodes per training step that are written to transcripts.jsonl."""
    prometheus: Annotated[PrometheusSink | None, _SWITCH] = None
    tensorboard: bool = False
    """Write TensorBoard event files to the run folder."""
    wandb: Annotated[WandbSink | None, _SWITCH] = None


class TrainingRun(Section):
    """The fields that every run has."""

    name: Annotated[str, StringConstraints(pattern=RUN_NAME_PATTERN)] = "run"
    """Name of the run and of its folder."""
    output_dir: PathText = "runs"
    """Parent folder of the run folders."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the training episodes and the sampling."""
    metrics: MetricsConfig = MetricsConfig()
    log_level: LogLevel = "info"
    """Lowest severity of the messages in trainer.log."""

    @property
    def folder(self) -> Path:
        """Absolute path of the run's folder, which every process can use."""
        return Path(self.output_dir).absolute() / self.name

    @model_validator(mode="before")
    @classmethod
    def _name_single_environment(cls, tree: Any) -> Any:
        """Turn the section `environment` into the only entry of `environments`."""
        if isinstance(tree, dict) and isinstance(tree.get("environment"), list):
            raise ValueError(
                "environment: expected one section, [environment], got a list, [[environment]]; "
                "give each environment a name: [environments.<name>]"
            )
        if not isinstance(tree, dict) or not isinstance(tree.get("environment"), dict):
            return tree
        if "environments" in tree:
            raise ValueError(
                "the run has both environment and environments; move [environment] to "
                "[environments.<name>]"
            )
        other_fields = {key: value for key, value in tree.items() if key != "environment"}
        environment = tree["environment"]
        return {**other_fields, "environments": {make_environment_name(environment): environment}}
