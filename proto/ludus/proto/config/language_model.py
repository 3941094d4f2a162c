"""Runs that train a language model, and the checks across their sections."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ludus.proto.config.algorithm import AlgorithmConfig, GrpoConfig
from ludus.proto.config.environment import (
    Curriculum,
    EnvironmentConfig,
    EnvironmentName,
    LocalEnvironment,
    RemoteEnvironment,
    make_environment_name,
)
from ludus.proto.config.section import (
    MAX_VLLM_TEMPERATURE,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
)
from ludus.proto.config.sections import (
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    PlacementConfig,
    PretrainedModel,
    RayWeightStore,
    RolloutConfig,
    TinyModel,
    TransformersGenerator,
    VllmGenerator,
    WeightStoreConfig,
)
from ludus.proto.config.training_run import EvalSection, TrainingRun, TrainingSection


class TrainingConfig(TrainingSection):
    """Length of the training, and the distance between sampling and learning."""

    num_epochs: PositiveFloat | None = None
    """Number of passes over the tasks of an environment with a fixed number of tasks, such as the
    rows of a data set (docs/data.md). Replaces num_steps, which is computed when the run starts.
    The last step is filled up with tasks of the next pass."""
    groups_per_step: PositiveInt = 32
    """Number of groups in a batch."""
    max_staleness: NonNegativeInt = 1
    """Largest staleness of a sample, in policy versions."""
    window_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Largest lead that a finished group may have over an older group that is still being played,
    as a share of all groups in flight."""
    max_learner_restarts: NonNegativeInt = 3
    """Number of times that the learner's ranks are restarted from the latest checkpoint when a
    rank dies."""
    learner_timeout_s: Seconds = 3600.0
    """Time limit in seconds of one call of the learner, such as a training step or a checkpoint.
    After that, its ranks are restarted."""
    idle_timeout_s: Seconds = 3600.0
    """Time in seconds without progress after which the run stops: no group finishes while a batch
    is awaited, no rollout worker is ready, or the replay buffer does not respond. Must be longer
    than rollout.group_timeout_s, and longer than a worker takes to start."""


class EvalConfig(EvalSection):
    """Evaluations of a language model, on seeds that training never uses."""

    num_games: PositiveInt = 10_000
    """Number of episodes in the evaluation after the last step."""
    num_games_during: NonNegativeInt = 2_000
    """Number of episodes in each evaluation before and during training; 0 turns these
    evaluations off."""
    max_games_per_task: PositiveInt | None = 4
    """Maximum number of episodes per held-back task, in environments with a data set. An
    evaluation of 50 held-back rows has therefore at most 200 episodes. At temperature 0, one
    episode per task is played, because further ones would be the same. null sets no limit."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature. 0 always takes the most probable token; 1 plays the policy as it is
    trained. The other sampling settings are those of section rollout."""
    timeout_s: Seconds = 14_400.0
    """Time limit in seconds of one evaluation in one environment. After that, the run stops."""


def _make_default_environments() -> dict[str, LocalEnvironment | RemoteEnvironment]:
    return {"openspiel": LocalEnvironment()}


class LanguageModelRun(TrainingRun):
    """A run that trains a language model."""

    kind: Literal["language_model"] = "language_model"
    """Kind of the run."""
    preset: Literal["torchforge", "trl", "dapo"] | None = None
    """Settings of another project, used for every field that the file does not set."""
    environments: dict[EnvironmentName, EnvironmentConfig] = Field(
        default_factory=_make_default_environments, min_length=1
    )
    """Environments by name. A single environment may be written as section `environment`."""
    curriculum: Curriculum | None = None
    model: ModelConfig = TinyModel()
    """The initial policy."""
    generator: GeneratorConfig = TransformersGenerator()
    """The inference engine of the rollout workers."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = GrpoConfig()
    learner: LearnerConfig = LearnerConfig()
    training: TrainingConfig = TrainingConfig()
    weights: WeightStoreConfig = RayWeightStore()
    """The store that brings the weights from the learner to the rollout workers."""
    eval: EvalConfig = EvalConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        self._check_minibatches()
        self._check_weight_decay()
        self._check_tokens()
        self._check_engine()
        self._check_temperatures()
        self._check_sessions()
        self._check_distribution()
        self._check_constraint()
        self._check_batch_rollouts()
        self._check_workers()
        self._check_timeouts()
        self._check_epochs()
        self._check_invalid_action_rewards()
        return self

    def _check_minibatches(self) -> None:
        num_groups, num_minibatches = self.training.groups_per_step, self.learner.num_minibatches
        if num_groups % num_minibatches:
            raise ValueError(
                f"training.groups_per_step = {num_groups} cannot be split into "
                f"learner.num_minibatches = {num_minibatches} equal parts; set groups_per_step to "
                f"a multiple, for example {(num_groups // num_minibatches + 1) * num_minibatches}"
            )

    def _check_weight_decay(self) -> None:
        check_weight_decay(self.learning_rate, self.learner.weight_decay)

    def _check_tokens(self) -> None:
        if isinstance(self.model, TinyModel) and self.rollout.max_tokens > self.model.max_tokens:
            raise ValueError(
                f"rollout.max_tokens = {self.rollout.max_tokens} is more than model.max_tokens = "
                f"{self.model.max_tokens}; lower the first or raise the second"
            )
        for name, environment in self.environments.items():
            section = self.environment_section(name)
            max_tokens = environment.max_tokens or self.rollout.max_tokens
            max_completion_tokens = (
                environment.max_completion_tokens or self.rollout.max_completion_tokens
            )
            if max_tokens > self.rollout.max_tokens:
                raise ValueError(
                    f"{section}.max_tokens = {max_tokens} is more than "
                    f"rollout.max_tokens = {self.rollout.max_tokens}, the length that the model "
                    "is loaded for; lower the first or raise the second"
                )
            if max_completion_tokens >= max_tokens:
                raise ValueError(
                    f"{section}: max_completion_tokens = {max_completion_tokens} leaves no room "
                    f"for a prompt in max_tokens = {max_tokens}; lower the first or raise the "
                    "second"
                )

    def _check_engine(self) -> None:
        if not isinstance(self.generator, VllmGenerator):
            return
        token_limit, num_gpus = self.generator.max_model_tokens, self.generator.tensor_parallel_size
        if token_limit is not None and token_limit < self.rollout.max_tokens:
            raise ValueError(
                f"generator.max_model_tokens = {token_limit} is less than rollout.max_tokens "
                f"= {self.rollout.max_tokens}, and vLLM would reject longer sequences; raise or "
                "remove the first, or lower the second"
            )
        if num_gpus > 1 and self.rollout.num_gpus_per_worker != num_gpus:
            raise ValueError(
                f"generator.tensor_parallel_size = {num_gpus} needs {num_gpus} GPUs per worker, "
                f"but rollout.num_gpus_per_worker = {self.rollout.num_gpus_per_worker:g}; set it "
                f"to {num_gpus}"
            )

    def _check_temperatures(self) -> None:
        if not isinstance(self.generator, VllmGenerator):
            return
        for section, temperature in (
            ("rollout", self.rollout.temperature),
            ("eval", self.eval.temperature),
        ):
            if temperature > MAX_VLLM_TEMPERATURE:
                raise ValueError(
                    f"{section}.temperature = {temperature:g} is more than vLLM's maximum, "
                    f"{MAX_VLLM_TEMPERATURE:g}; lower it, or set generator.kind = 'transformers'"
                )

    def _check_sessions(self) -> None:
        rollout = self.rollout
        num_sessions = rollout.num_workers * rollout.num_groups_in_flight * rollout.group_size
        for environment in self.environments.values():
            if (
                isinstance(environment, LocalEnvironment)
                and num_sessions > environment.max_sessions
            ):
                raise ValueError(
                    f"rollout.num_workers * num_groups_in_flight * group_size = {num_sessions} "
                    f"sessions, but environment.max_sessions = {environment.max_sessions}; raise "
                    f"it to {num_sessions}"
                )

    def _check_workers(self) -> None:
        if self.rollout.min_workers > self.rollout.num_workers:
            raise ValueError(
                f"rollout.min_workers = {self.rollout.min_workers} is more than "
                f"rollout.num_workers = {self.rollout.num_workers}; lower the first or raise the "
                "second"
            )

    def _check_timeouts(self) -> None:
        group_timeout_s, idle_timeout_s = self.rollout.group_timeout_s, self.training.idle_timeout_s
        if group_timeout_s >= idle_timeout_s:
            raise ValueError(
                f"training.idle_timeout_s = {idle_timeout_s:g} must be longer than "
                f"rollout.group_timeout_s = {group_timeout_s:g}, or the run stops while a group is "
                "still being played; raise idle_timeout_s"
            )

    def _check_epochs(self) -> None:
        num_epochs = self.training.num_epochs
        if num_epochs is None:
            return
        if len(self.environments) > 1:
            raise ValueError(
                f"training.num_epochs = {num_epochs:g} counts the tasks of one environment, but "
                f"the run has {len(self.environments)}; set training.num_steps instead, or put all "
                "rows into one data set"
            )
        if self.algorithm.zero_variance_groups == "replace":
            raise ValueError(
                f"training.num_epochs = {num_epochs:g} trains on every task, but "
                "algorithm.zero_variance_groups = 'replace' skips groups of equal rewards; set it "
                "to 'keep', or set training.num_steps instead"
            )

    def _check_invalid_action_rewards(self) -> None:
        reward = self.rollout.invalid_action_reward
        environments = self.environments.values()
        if reward is None or any(config.invalid_action_reward is None for config in environments):
            return
        fields = [f"{self.environment_section(name)}" for name in self.environments]
        raise ValueError(
            f"rollout.invalid_action_reward = {reward:g} has no effect, because every environment "
            f"has its own; set invalid_action_reward in {' and '.join(fields)}, or remove it there"
        )

    def _check_batch_rollouts(self) -> None:
        has_runner = any(environment.plays_in_batches for environment in self.environments.values())
        if self.rollout.generate_port is not None and not has_runner:
            raise ValueError(
                f"rollout.generate_port = {self.rollout.generate_port} needs a registered "
                "runner, but rollout of no environment names a runner; remove generate_port"
            )
        for name, environment in self.environments.items():
            if environment.plays_in_batches and self.rollout.group_seed != "shared":
                raise ValueError(
                    f"{self.environment_section(name)}.rollout = '{environment.rollout}' samples "
                    "each prompt group_size times, but rollout.group_seed = "
                    f"'{self.rollout.group_seed}' gives every episode a different prompt; set "
                    "rollout.group_seed = 'shared'"
                )

    def _check_distribution(self) -> None:
        """Raise an error if log-probs of a changed distribution are compared with the learner's."""
        comparison, setting = self.algorithm.sampler_comparison, self.rollout.changed_distribution
        if setting is None or not comparison:
            return
        field, value, effect = setting
        default_value = type(self.rollout).model_fields[field].default
        raise ValueError(
            f"rollout.{field} = {value} samples from a {effect} distribution, whose log-probs "
            f"cannot be compared with the learner's, but algorithm.{comparison} compares them; set "
            f"rollout.{field} = {default_value:g}, or algorithm.correction.kind = 'off', "
            "geometric_mask = null and old_logprobs = 'recompute'"
        )

    def _check_constraint(self) -> None:
        """Raise an error if completions cannot be restricted to the legal answers."""
        if self.rollout.constrain == "none":
            return
        constraint = f"rollout.constrain = '{self.rollout.constrain}'"
        if isinstance(self.model, PretrainedModel) and self.model.enable_thinking:
            raise ValueError(
                f"{constraint} leaves no room for thoughts, but model.enable_thinking = true; "
                "set it to false, or remove rollout.constrain"
            )
        for name, environment in self.environments.items():
            settings = {
                "agent": environment.agent is not None,
                "rollout": environment.rollout is not None,
                "tools": environment.tools,
                "parse": environment.parse is not None,
            }
            fields = [field for field, is_set in settings.items() if is_set]
            if fields:
                raise ValueError(
                    f"{constraint} restricts completions to the answers that the environment's "
                    f"text_renderer lists, but {self.environment_section(name)}.{fields[0]} of "
                    f"environment '{name}' lets completions be other texts; remove {fields[0]}, "
                    "or remove rollout.constrain"
                )

    @property
    def learning_rate(self) -> float:
        """The peak learning rate."""
        configured_rate = self.learner.learning_rate
        return self.model.default_learning_rate if configured_rate is None else configured_rate

    @property
    def environment(self) -> LocalEnvironment | RemoteEnvironment:
        """The first environment, for output that shows only one."""
        return next(iter(self.environments.values()))

    def environment_section(self, name: str) -> str:
        """Return the section of an environment as users write it.

        A single environment with its default name is written as section `environment`.
        """
        is_single = len(self.environments) == 1
        if is_single and name == make_environment_name(self.environments[name].model_dump()):
            return "environment"
        return f"environments.{name}"


def check_weight_decay(learning_rate: float, weight_decay: float) -> None:
    """Raise a ValueError if a step would remove every weight."""
    if learning_rate * weight_decay >= 1:
        raise ValueError(
            f"learner.weight_decay = {weight_decay:g} times learner.learning_rate = "
            f"{learning_rate:g} is the share of every weight that each step removes, and must "
            "be less than 1; lower weight_decay, which usually is between 0 and 0.1"
        )
