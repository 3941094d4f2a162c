"""Runs that train networks by classic PPO: any torch modules, in any Gymnasium environment.

`model.kind = "network"` makes a run one of these. It has a section of its own, `ppo`, and none of
those that language models are sampled and trained by: what a file says there is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from ludus.proto.config.environment import RANDOM_POLICY, RemoteEnvironment
from ludus.proto.config.section import (
    ImportPath,
    LearningRate,
    NonNegativeFloat,
    NumThreads,
    PositiveFloat,
    PositiveInt,
    Section,
)

if TYPE_CHECKING:
    from ludus.proto.config.run import RunConfig

GYMNASIUM = "gymnasium:"
"""Begins the package of an environment that Gymnasium makes."""
NETWORK_EVAL: dict[str, Any] = {"num_games": 100, "num_games_during": 20, "temperature": 0.0}
"""Section `eval` of a network, where a file says nothing: its episodes are long, and its likeliest
action is what one wants of it."""
_SECTIONS = (
    "preset",
    "curriculum",
    "generator",
    "rollout",
    "algorithm",
    "learner",
    "weights",
    "placement",
)
"""Of language models alone."""
_FIELDS = {
    "environment": {
        *("render", "parse", "tools", "rollout", "policies", "policy_chart", "rewards", "weight"),
        *("max_tokens", "max_completion_tokens", "resume", "max_sessions"),
    },
    "training": {
        *("groups_per_step", "max_staleness", "window_fraction", "max_learner_restarts"),
        *("learner_timeout_s", "idle_timeout_s"),
    },
    "eval": {"timeout_s"},
}
"""The same within the sections that both have."""


class NetworkModel(Section):
    """Torch modules that see observations as tensors: an actor, and a critic beside it."""

    kind: Literal["network"] = "network"
    make: ImportPath | None = None
    """Makes both: (observation_space, action_space) -> (actor, critic); null makes perceptrons."""
    hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (64, 64)
    """Widths of the hidden layers of either perceptron."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Between these layers."""
    initial_std: PositiveFloat = 1.0
    """Standard deviation of continuous actions in the beginning, as a share of half their range
    where they have one. It is trained, and the same in all states."""
    normalise_observations: bool = False
    """Whether observations are shifted and scaled by the mean and deviation of those seen."""
    device: str = "cpu"
    """Where torch computes; small networks are fastest on a CPU."""

    @model_validator(mode="after")
    def _is_made_one_way(self) -> Self:
        if self.make is None:
            return self
        for name in ("hidden", "activation", "initial_std"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"model.make = '{self.make}' makes the networks, so model.{name} = "
                    f"{getattr(self, name)!r} would go unheard; remove the one or the other"
                )
        return self


class NetworkPpoConfig(Section):
    """How a network is trained: PPO (arXiv 1707.06347) over environments side by side."""

    num_environments: PositiveInt = 8
    """Episodes that are played side by side."""
    steps_per_environment: PositiveInt = 128
    """Steps in each of them between two updates of the network: one training step."""
    num_epochs: PositiveInt = 10
    """Passes over what was played, in each update."""
    minibatch_size: PositiveInt = 64
    """Steps under one gradient."""
    learning_rate: LearningRate = 3e-4
    """Of Adam, in the beginning."""
    critic_learning_rate: LearningRate | None = None
    """The same for the critic; null is the actor's."""
    schedule: Literal["constant", "linear"] = "linear"
    """Whether learning rates stay, or fall to zero over training.num_steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Discount per step."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of generalised advantage estimation per step."""
    clip: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio of the new policy to the old one is clipped at 1 -+ clip."""
    value_clip: PositiveFloat | None = None
    """A value may move this far from its old one in an update; null does not clip it."""
    value_coef: PositiveFloat = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: PositiveFloat = 0.5
    """Gradients are scaled down to this norm, those of actor and critic together."""
    normalise_advantages: bool = True
    """Whether the advantages of each minibatch get mean 0 and standard deviation 1."""
    scale_rewards: bool = False
    """Whether rewards are divided by the deviation of the discounted returns seen."""
    target_kl: PositiveFloat | None = None
    """Ends an update after the pass in which the policy has moved this far, in nats per step."""
    target_return: float | None = None
    """Ends training after an evaluation whose mean return reaches it, as that of eval.num_games
    other games does; null trains every step."""
    num_threads: NumThreads = 1
    """CPU threads of torch: small networks are fastest with one."""


def check_network_run(run: RunConfig) -> None:
    """Check what holds across the sections of a run that trains a network.

    Raises:
        ValueError: a field is set that means nothing here, or that cannot be had.
    """
    meaningless = [*_set_sections(run), *_set_fields(run)]
    if meaningless:
        raise ValueError(
            "model.kind = 'network' trains torch modules by the section ppo, where "
            f"{', '.join(meaningless)} would mean nothing; remove what is set there"
        )
    if len(run.environments) != 1:
        raise ValueError(
            f"model.kind = 'network' trains in one environment, got {len(run.environments)}: "
            f"{', '.join(run.environments)}; keep one of them"
        )
    _check_environment(run)
    if run.eval.temperature not in (0.0, 1.0):
        raise ValueError(
            f"eval.temperature expected 0 (the likeliest action) or 1 (the policy as it is "
            f"trained) for model.kind = 'network', got {run.eval.temperature:g}"
        )


def _check_environment(run: RunConfig) -> None:
    environment = run.environment
    if not isinstance(environment, RemoteEnvironment) and not environment.package.startswith(
        GYMNASIUM
    ):
        raise ValueError(
            f"environment.package expected one of Gymnasium's, like 'gymnasium:CartPole-v1', for "
            f"model.kind = 'network', got '{environment.package}'; others can be served and "
            "reached with environment.kind = 'remote'"
        )
    unknown = [name for name in environment.baselines if name != RANDOM_POLICY]
    if unknown:
        raise ValueError(
            f"environment.baselines expected ['{RANDOM_POLICY}'] or none for model.kind = "
            f"'network', got {unknown}"
        )


def _set_sections(run: RunConfig) -> Iterator[str]:
    for name in _SECTIONS:
        value, default = getattr(run, name), _default_of(type(run).model_fields[name])
        if value == default:
            continue
        if not isinstance(value, BaseModel) or type(value) is not type(default):
            yield name
        else:
            yield from (f"{name}.{field}" for field in _differing(value))


def _set_fields(run: RunConfig) -> Iterator[str]:
    parts = {"environment": run.environment, "training": run.training, "eval": run.eval}
    for section, part in parts.items():
        yield from (f"{section}.{name}" for name in _differing(part) if name in _FIELDS[section])


def _differing(section: BaseModel) -> list[str]:
    """The fields of a section that are not as they are by default."""
    return [
        name
        for name, field in type(section).model_fields.items()
        if getattr(section, name) != _default_of(field)
    ]


def _default_of(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})
