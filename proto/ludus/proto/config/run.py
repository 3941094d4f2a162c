"""The root of the configuration tree, and what holds across its sections."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import StringConstraints, model_validator

from ludus.proto.config.algorithm import GrpoConfig
from ludus.proto.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from ludus.proto.config.sections import (
    EnvironmentConfig,
    GeneratorConfig,
    LearnerConfig,
    LocalEnvironment,
    ModelConfig,
    RayWeightStore,
    RolloutConfig,
    TinyModel,
    TransformersGenerator,
    WeightStoreConfig,
)


class TrainingConfig(Section):
    """How long to train, and how far sampling may run ahead."""

    num_steps: PositiveInt = 100
    """Batches to train on."""
    groups_per_step: PositiveInt = 32
    """Groups in a batch."""
    max_staleness: NonNegativeInt = 1
    """S: a sample is trained on at most S versions after the weights that began it."""
    checkpoint_every_steps: PositiveInt = 50
    """Steps between checkpoints; one more is written at the end and on Ctrl-C."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    shuffle_rewards: bool = False
    """Negative control: deals the rewards of a batch out at random, so that nothing is learned."""


class EvalConfig(Section):
    """How the policy is judged, on deals that training never sees."""

    num_games: PositiveInt = 10_000
    """Games of the evaluation after the last step."""
    num_games_during: NonNegativeInt = 2_000
    """Games of the evaluations before and while training; 0 turns those off."""
    every_steps: PositiveInt = 20
    """Steps between evaluations while training."""
    temperature: NonNegativeFloat = 1.0
    """0 takes the likeliest token; 1 plays the policy as it was trained."""
    baselines: tuple[str, ...] = ()
    """Fixed policies that play the same deals, by name."""
    random_policy: str | None = None
    """The baseline at which gap_closed is 0."""
    optimal_policy: str | None = None
    """The baseline at which gap_closed is 1."""
    seed: NonNegativeInt = 2_147_483_648
    """First seed of the evaluation deals; training deals have seeds below 2**30."""

    @model_validator(mode="after")
    def _ends_of_the_gap_are_played(self) -> Self:
        for field in ("random_policy", "optimal_policy"):
            name = getattr(self, field)
            if name is not None and name not in self.baselines:
                raise ValueError(
                    f"{field} = '{name}' is not played; add it to eval.baselines, "
                    f"now {list(self.baselines)}"
                )
        return self


class RunConfig(Section):
    """Everything a run depends on."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,46}$")] = "run"
    """Name of the run, and of its folder."""
    output_dir: str = "runs"
    """Folder that holds the folders of runs."""
    seed: NonNegativeInt = 0
    """Fixes initial weights, deals and sampling."""
    environment: EnvironmentConfig = LocalEnvironment()
    """Where episodes are played."""
    model: ModelConfig = TinyModel()
    """The policy's starting point."""
    generator: GeneratorConfig = TransformersGenerator()
    """What samples answers."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: GrpoConfig = GrpoConfig()
    learner: LearnerConfig = LearnerConfig()
    training: TrainingConfig = TrainingConfig()
    weights: WeightStoreConfig = RayWeightStore()
    """How weights reach the rollout workers."""
    eval: EvalConfig = EvalConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that trainer.log holds."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_minibatches()
        self._check_tokens()
        self._check_sessions()
        return self

    def _check_minibatches(self) -> None:
        groups, parts = self.training.groups_per_step, self.learner.num_minibatches
        if groups % parts:
            raise ValueError(
                f"training.groups_per_step = {groups} cannot be split into "
                f"learner.num_minibatches = {parts} equal parts; set groups_per_step to "
                f"a multiple, for example {(groups // parts + 1) * parts}"
            )

    def _check_tokens(self) -> None:
        if isinstance(self.model, TinyModel) and self.rollout.max_tokens > self.model.max_tokens:
            raise ValueError(
                f"rollout.max_tokens = {self.rollout.max_tokens} is more than model.max_tokens = "
                f"{self.model.max_tokens}; lower the one or raise the other"
            )

    def _check_sessions(self) -> None:
        environment, rollout = self.environment, self.rollout
        wanted = rollout.num_workers * rollout.num_groups_in_flight * rollout.group_size
        if isinstance(environment, LocalEnvironment) and wanted > environment.max_sessions:
            raise ValueError(
                f"rollout.num_workers * num_groups_in_flight * group_size = {wanted} sessions, "
                f"but environment.max_sessions = {environment.max_sessions}; raise it to {wanted}"
            )

    @property
    def episodes_per_step(self) -> int:
        """Episodes in one batch."""
        return self.training.groups_per_step * self.rollout.group_size
