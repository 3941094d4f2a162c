"""Runs that train networks: any pair of torch modules, by PPO, in any Gymnasium environment.

kind = "network"  -->  NetworkRun: environment, model, ppo, training, eval
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ludus.proto.config.environment import EnvironmentName, ServerConnection
from ludus.proto.config.section import (
    ImportPath,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    NumThreads,
    PositiveFloat,
    PositiveInt,
    Section,
    assume_kind,
)
from ludus.proto.config.training_run import EvalSection, TrainingRun, TrainingSection

GYMNASIUM_PREFIX = "gymnasium:"
"""Prefix of `package` if `gymnasium.make` creates the environment."""


class _NetworkEnvironment(Section):
    baselines: tuple[Literal["random"], ...] = ()
    """Fixed policies that play the same seeds as an evaluation; "random" is the only one."""
    max_turns: PositiveInt | None = None
    """Maximum number of steps of an episode. null leaves the limit to the environment."""


class LocalNetworkEnvironment(_NetworkEnvironment):
    """Gymnasium environments in the process of the run."""

    kind: Literal["local"] = "local"
    package: str
    """Gymnasium environment, for example gymnasium:CartPole-v1. For other environments, start a
    server and use kind = "remote"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of gymnasium.make."""

    @field_validator("package")
    @classmethod
    def _check_package(cls, package: str) -> str:
        if not package.startswith(GYMNASIUM_PREFIX):
            raise ValueError(
                "expected a Gymnasium environment, for example 'gymnasium:CartPole-v1', got "
                f"'{package}'; serve other environments, and set environment.kind = 'remote'"
            )
        return package


class RemoteNetworkEnvironment(_NetworkEnvironment, ServerConnection):
    """A running environment server with numeric actions and observations."""


NetworkEnvironmentConfig = Annotated[
    LocalNetworkEnvironment | RemoteNetworkEnvironment,
    Field(discriminator="kind"),
    assume_kind("local"),
]


class NetworkModel(Section):
    """An actor and a critic: torch modules that take observations as tensors."""

    make: ImportPath | None = None
    """Function that returns both modules: (observation_space, action_space) -> (actor, critic).
    null creates perceptrons."""
    hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (64, 64)
    """Widths of the hidden layers of each perceptron."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Activation function of the hidden layers."""
    initial_std: PositiveFloat = 1.0
    """Initial standard deviation of continuous actions, as a share of half their range if they
    have a range. It is trained, and is the same in all states."""
    normalise_observations: bool = False
    """Shift and scale observations by the mean and deviation of all observations so far."""
    device: str = "cpu"
    """torch device. Small networks are fastest on a CPU."""

    @model_validator(mode="after")
    def _check_make(self) -> Self:
        if self.make is None:
            return self
        for name in ("hidden", "activation", "initial_std"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"model.{name} = {getattr(self, name)!r} has no effect, because model.make = "
                    f"'{self.make}' makes the networks; remove one of them"
                )
        return self


class NetworkPpoConfig(Section):
    """PPO (arXiv 1707.06347) over parallel environments."""

    num_environments: PositiveInt = 8
    """Number of parallel environments."""
    steps_per_environment: PositiveInt = 128
    """Number of steps in each environment per training step."""
    num_epochs: PositiveInt = 10
    """Number of passes over the batch in each training step."""
    minibatch_size: PositiveInt = 64
    """Number of environment steps per minibatch."""
    learning_rate: LearningRate = 3e-4
    """Initial learning rate of Adam."""
    critic_learning_rate: LearningRate | None = None
    """Initial learning rate of the critic. null takes learning_rate."""
    schedule: Literal["constant", "linear"] = "linear"
    """Course of the learning rates: constant, or linear to zero over training.num_steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Discount per step."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of generalized advantage estimation per step."""
    clip: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Clipping range: the ratio of the new policy to the old one is clipped to 1 +/- clip."""
    value_clip: PositiveFloat | None = None
    """Largest change of a value from its old prediction in one training step. null does not clip
    values."""
    value_coef: PositiveFloat = 0.5
    """Coefficient of the value loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    max_grad_norm: PositiveFloat = 0.5
    """Maximum norm of the gradients of actor and critic together; larger gradients are scaled
    down."""
    normalise_advantages: bool = True
    """Give the advantages of each minibatch mean 0 and standard deviation 1."""
    scale_rewards: bool = False
    """Divide rewards by the standard deviation of the discounted returns so far."""
    target_kl: PositiveFloat | None = None
    """KL divergence from the old policy, in nats per step, above which no further pass starts.
    null makes all passes."""
    target_return: float | None = None
    """Mean return at which training stops early. An evaluation must reach it, and then
    eval.num_games other episodes must confirm it. null trains all steps."""
    num_threads: NumThreads = 1
    """Number of torch threads. Small networks are fastest with one."""


class NetworkEvalConfig(EvalSection):
    """Evaluations of a network, on seeds that training never uses."""

    num_games: PositiveInt = 100
    """Number of episodes in the evaluation after the last step."""
    num_games_during: NonNegativeInt = 20
    """Number of episodes in each evaluation before and during training; 0 turns these
    evaluations off."""
    temperature: NonNegativeFloat = 0.0
    """Choice of actions: 0 takes the most probable action, 1 samples as in training."""

    @field_validator("temperature")
    @classmethod
    def _check_greedy_or_sampled(cls, temperature: float) -> float:
        if temperature not in (0.0, 1.0):
            raise ValueError(
                "expected 0 (the most probable action) or 1 (the policy as it is trained), got "
                f"{temperature:g}"
            )
        return temperature


class NetworkRun(TrainingRun):
    """A run that trains a network by classic PPO, in one process."""

    kind: Literal["network"] = "network"
    """Kind of the run."""
    environments: Annotated[
        dict[EnvironmentName, NetworkEnvironmentConfig], Field(min_length=1, max_length=1)
    ]
    """The environment, by name. Usually written as section `environment`."""
    model: NetworkModel = NetworkModel()
    """The networks."""
    ppo: NetworkPpoConfig = NetworkPpoConfig()
    training: TrainingSection = TrainingSection()
    eval: NetworkEvalConfig = NetworkEvalConfig()

    @property
    def environment(self) -> LocalNetworkEnvironment | RemoteNetworkEnvironment:
        """The environment of the run."""
        return next(iter(self.environments.values()))
