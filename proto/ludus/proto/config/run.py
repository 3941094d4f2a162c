"""The root of the configuration tree, and what holds across its sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from ludus.proto.config.algorithm import AlgorithmConfig, GrpoConfig
from ludus.proto.config.environment import (
    Curriculum,
    EnvironmentConfig,
    EnvironmentName,
    LocalEnvironment,
    RemoteEnvironment,
    name_of_environment,
)
from ludus.proto.config.network import (
    NETWORK_EVAL,
    NetworkModel,
    NetworkPpoConfig,
    check_network_run,
)
from ludus.proto.config.section import (
    HIGHEST_VLLM_TEMPERATURE,
    LOWEST_TEMPERATURE,
    RUN_NAME,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)
from ludus.proto.config.sections import (
    GeneratorConfig,
    LearnerConfig,
    MetricsConfig,
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
from ludus.proto.seeds import FIRST_EVAL_SEED

_LAST_EVAL_SEED = 2**63
TINY_LEARNING_RATE = 2e-3
"""Where nothing is said, of a model that was made on the spot."""


class TrainingConfig(Section):
    """How long to train, and how far sampling may run ahead."""

    num_steps: PositiveInt = 100
    """Batches to train on."""
    num_epochs: PositiveFloat | None = None
    """Passes over the tasks of an environment that has so many of them, such as rows of a data
    set (docs/data.md). Takes the place of num_steps, which follows from it when the run starts;
    the last step is filled up with tasks of the next pass."""
    groups_per_step: PositiveInt = 32
    """Groups in a batch."""
    max_staleness: NonNegativeInt = 1
    """S: a sample is trained on at most S versions after the weights that began it."""
    checkpoint_every_steps: PositiveInt = 50
    """Steps between checkpoints; one more is written at the end and on Ctrl-C."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    window_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Groups may be trained on before an older one that is still played, if they are younger by
    less than this share of all groups that may be begun."""
    max_learner_restarts: NonNegativeInt = 3
    """How often the learner's ranks are restarted from the newest checkpoint when one dies."""
    learner_timeout_s: Seconds = 3600.0
    """How long the learner may take for one call, such as a training step or a checkpoint, before
    its ranks are restarted."""
    idle_timeout_s: Seconds = 3600.0
    """How long the run may stand still: no group comes to its end while a batch is waited for, no
    rollout worker is ready, or the replay buffer does not answer. Longer than a worker takes to
    start, and than rollout.group_timeout_s."""
    shuffle_rewards: bool = False
    """Negative control: shuffles the rewards of a batch, so that nothing is learned."""


class EvalConfig(Section):
    """How the policy is judged, on seeds that training never sees."""

    num_games: PositiveInt = 10_000
    """Games of the evaluation after the last step; where nothing is said, 100 of a network."""
    num_games_during: NonNegativeInt = 2_000
    """Games of the evaluations before and while training; 0 turns those off. Where nothing is
    said, 20 of a network."""
    every_steps: PositiveInt = 20
    """Steps between evaluations while training."""
    temperature: NonNegativeFloat = 1.0
    """0 takes the likeliest token; 1 plays the policy as it was trained. Where nothing is said, 0
    of a network."""
    timeout_s: Seconds = 14_400.0
    """How long the games of one evaluation, in one environment, may take before the run ends."""
    seed: int = FIRST_EVAL_SEED
    """First seed of the evaluation, at least 2**31; those of training and of the warm start are
    below."""

    @field_validator("seed")
    @classmethod
    def _is_never_trained_on(cls, seed: int) -> int:
        if seed < FIRST_EVAL_SEED:
            raise ValueError(
                f"expected at least {FIRST_EVAL_SEED} (2**31), got {seed}: training and the warm "
                "start play the seeds below, and a policy is judged on games that it has never seen"
            )
        if seed > _LAST_EVAL_SEED:
            raise ValueError(
                f"expected at most {_LAST_EVAL_SEED} (2**63), got {seed}: servers take seeds of 64 "
                "bits, and games take those that follow"
            )
        return seed

    @field_validator("temperature")
    @classmethod
    def _is_sampled_at(cls, temperature: float) -> float:
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"expected 0, which takes the likeliest token, or {LOWEST_TEMPERATURE:g} or more, "
                f"got {temperature:g}"
            )
        return temperature


def _card_and_board_games() -> dict[str, LocalEnvironment | RemoteEnvironment]:
    return {"openspiel": LocalEnvironment()}


class RunConfig(Section):
    """Everything a run depends on."""

    name: Annotated[str, StringConstraints(pattern=RUN_NAME)] = "run"
    """Name of the run, and of its folder."""
    output_dir: str = "runs"
    """Folder that holds the folders of runs."""
    seed: NonNegativeInt = 0
    """Fixes initial weights, the environments' seeds and sampling."""
    preset: Literal["torchforge", "trl", "dapo"] | None = None
    """Settings of another project, which stand wherever this file says nothing."""
    environments: dict[EnvironmentName, EnvironmentConfig] = Field(
        default_factory=_card_and_board_games, min_length=1
    )
    """Where episodes are played, by name. One alone may be written as section `environment`."""
    curriculum: Curriculum | None = None
    model: ModelConfig = TinyModel()
    """The policy's starting point."""
    generator: GeneratorConfig = TransformersGenerator()
    """What samples answers."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = GrpoConfig()
    learner: LearnerConfig = LearnerConfig()
    ppo: NetworkPpoConfig | None = None
    """Of runs with model.kind = "network" alone, and always there."""
    training: TrainingConfig = TrainingConfig()
    weights: WeightStoreConfig = RayWeightStore()
    """How weights reach the rollout workers."""
    eval: EvalConfig = EvalConfig()
    placement: PlacementConfig = PlacementConfig()
    metrics: MetricsConfig = MetricsConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that trainer.log holds."""

    @model_validator(mode="before")
    @classmethod
    def _one_environment_alone(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and isinstance(tree.get("environment"), list):
            raise ValueError(
                "environment: expected one section, [environment], got a list, as [[environment]] "
                "writes it; give each environment a name, [environments.<name>]"
            )
        if not isinstance(tree, dict) or not isinstance(tree.get("environment"), dict):
            return tree
        if "environments" in tree:
            raise ValueError(
                "expected environment or environments, got both; move [environment] to "
                "[environments.<name>]"
            )
        rest = {key: value for key, value in tree.items() if key != "environment"}
        alone = tree["environment"]
        return {**rest, "environments": {name_of_environment(alone): alone}}

    @model_validator(mode="before")
    @classmethod
    def _tiny_models_learn_faster(cls, tree: Any) -> Any:
        """At the rate of a pretrained model a tiny one would learn nothing."""
        if not isinstance(tree, dict):
            return tree
        model, learner = tree.get("model", {}), tree.get("learner", {})
        is_tiny = isinstance(model, dict) and model.get("kind", "tiny") == "tiny"
        if not is_tiny or not isinstance(learner, dict) or "learning_rate" in learner:
            return tree
        return {**tree, "learner": {**learner, "learning_rate": TINY_LEARNING_RATE}}

    @model_validator(mode="before")
    @classmethod
    def _networks_have_their_own(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
            return tree
        if tree["model"].get("kind") != "network":
            return tree
        judged = tree.get("eval", {})
        if isinstance(judged, dict):
            tree = {**tree, "eval": {**NETWORK_EVAL, **judged}}
        return tree if tree.get("ppo") is not None else {**tree, "ppo": {}}

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if isinstance(self.model, NetworkModel):
            check_network_run(self)
            return self
        if self.ppo is not None:
            raise ValueError(
                f"section ppo is of model.kind = 'network', but model.kind = '{self.model.kind}'; "
                "remove it, or set algorithm.kind = 'ppo'"
            )
        self._check_minibatches()
        self._check_tokens()
        self._check_engine()
        self._check_temperatures()
        self._check_sessions()
        self._check_algorithm()
        self._check_limits()
        self._check_epochs()
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
        for name, environment in self.environments.items():
            num_tokens = environment.max_tokens or self.rollout.max_tokens
            completion = environment.max_completion_tokens or self.rollout.max_completion_tokens
            if num_tokens > self.rollout.max_tokens:
                raise ValueError(
                    f"{self.section_of(name)}.max_tokens = {num_tokens} is more than "
                    f"rollout.max_tokens = {self.rollout.max_tokens}, which the model is made "
                    "ready for; lower the one or raise the other"
                )
            if completion >= num_tokens:
                raise ValueError(
                    f"{self.section_of(name)}: max_completion_tokens = {completion} leaves no room "
                    f"for a prompt in max_tokens = {num_tokens}; lower the one or raise the other"
                )

    def _check_engine(self) -> None:
        if not isinstance(self.generator, VllmGenerator):
            return
        longest, num_gpus = self.generator.max_model_tokens, self.generator.tensor_parallel_size
        if longest is not None and longest < self.rollout.max_tokens:
            raise ValueError(
                f"generator.max_model_tokens = {longest} is less than rollout.max_tokens = "
                f"{self.rollout.max_tokens}, and vLLM would refuse what is longer; raise the one, "
                "lower the other, or leave max_model_tokens out"
            )
        if num_gpus > 1 and self.rollout.num_gpus_per_worker != num_gpus:
            raise ValueError(
                f"generator.tensor_parallel_size = {num_gpus} spreads a model over as many GPUs, "
                f"but rollout.num_gpus_per_worker = {self.rollout.num_gpus_per_worker:g}; set it "
                f"to {num_gpus}"
            )

    def _check_temperatures(self) -> None:
        if not isinstance(self.generator, VllmGenerator):
            return
        for section, value in (
            ("rollout", self.rollout.temperature),
            ("eval", self.eval.temperature),
        ):
            if value > HIGHEST_VLLM_TEMPERATURE:
                raise ValueError(
                    f"{section}.temperature = {value:g}, but vLLM samples at "
                    f"{HIGHEST_VLLM_TEMPERATURE:g} at most; lower it, or set generator.kind = "
                    "'transformers'"
                )

    def _check_sessions(self) -> None:
        rollout = self.rollout
        wanted = rollout.num_workers * rollout.num_groups_in_flight * rollout.group_size
        for environment in self.environments.values():
            if isinstance(environment, LocalEnvironment) and wanted > environment.max_sessions:
                raise ValueError(
                    f"rollout.num_workers * num_groups_in_flight * group_size = {wanted} sessions, "
                    f"but environment.max_sessions = {environment.max_sessions}; raise it to "
                    f"{wanted}"
                )

    def _check_limits(self) -> None:
        group_s, idle_s = self.rollout.group_timeout_s, self.training.idle_timeout_s
        if group_s >= idle_s:
            raise ValueError(
                f"rollout.group_timeout_s = {group_s:g} lets a group take as long as the run may "
                f"stand still, training.idle_timeout_s = {idle_s:g}; raise idle_timeout_s above it"
            )

    def _check_epochs(self) -> None:
        epochs = self.training.num_epochs
        if epochs is None:
            return
        if len(self.environments) > 1:
            raise ValueError(
                f"training.num_epochs = {epochs:g} counts the tasks of one environment, got "
                f"{len(self.environments)}; set training.num_steps instead, or put the rows of "
                "all into one data set"
            )
        if self.algorithm.zero_variance_groups == "replace":
            raise ValueError(
                f"training.num_epochs = {epochs:g} trains on every task, but "
                "algorithm.zero_variance_groups = 'replace' leaves groups of equal rewards out "
                "and plays others; set it to 'keep', or set training.num_steps instead"
            )

    def _check_algorithm(self) -> None:
        self._check_distribution()
        self._check_batch_rollouts()
        if self.rollout.min_workers > self.rollout.num_workers:
            raise ValueError(
                f"rollout.min_workers = {self.rollout.min_workers} is more than "
                f"rollout.num_workers = {self.rollout.num_workers}; lower the one or raise the "
                "other"
            )

    def _check_batch_rollouts(self) -> None:
        for name, environment in self.environments.items():
            if environment.plays_in_batches and self.rollout.group_seed != "shared":
                raise ValueError(
                    f"{self.section_of(name)}.rollout = '{environment.rollout}' answers each "
                    "prompt group_size times, but rollout.group_seed = "
                    f"'{self.rollout.group_seed}' gives every episode another one; set "
                    "rollout.group_seed = 'shared'"
                )

    def _check_distribution(self) -> None:
        """Refuse to compare log-probs of a distribution that the learner does not compute."""
        compared, changed = self.algorithm.compares_with_sampler, self.rollout.changed_distribution
        if changed is None or not compared:
            return
        field, value, what = changed
        neutral = type(self.rollout).model_fields[field].default
        raise ValueError(
            f"rollout.{field} = {value} samples from a {what} distribution, whose log-probs cannot "
            f"be compared with the learner's, but algorithm.{compared} does; set rollout.{field} = "
            f"{neutral:g}, or algorithm.correction.kind = 'off', geometric_mask = null and "
            "old_logprobs = 'recompute'"
        )

    @property
    def language_model(self) -> TinyModel | PretrainedModel:
        """The model of a run that trains a language model."""
        assert not isinstance(self.model, NetworkModel), "networks are trained elsewhere"
        return self.model

    @property
    def environment(self) -> LocalEnvironment | RemoteEnvironment:
        """The first environment, for what shows one only."""
        return next(iter(self.environments.values()))

    def section_of(self, name: str) -> str:
        """The section of an environment, as one writes it: alone, it needs no name."""
        is_alone = len(self.environments) == 1
        if is_alone and name == name_of_environment(self.environments[name].model_dump()):
            return "environment"
        return f"environments.{name}"
