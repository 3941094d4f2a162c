"""Where episodes are played, how they are shown, and what they are worth."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from ludus.proto.config.agent import AgentConfig
from ludus.proto.config.section import (
    ImportPath,
    PositiveFloat,
    PositiveInt,
    RolloutPath,
    Seconds,
    Section,
    default_kind,
)

TRL_PREFIX = "trl:"
"""Of rollout functions that play many episodes in one call."""
RANDOM_POLICY = "random"
"""The fixed policy that every environment has which describes its actions."""


class RewardTerm(Section):
    """A term of an episode's reward: the environment's own return, or a function."""

    kind: Literal["function"] = "function"
    function: ImportPath | None = None
    """Called with lists, one entry per episode of a group that is not void, as keyword
    arguments: prompts, completions, and every field of the rollouts (docs/rewards.md); returns
    one number or None (cannot be scored) per episode. Null is the environment's own return."""
    weight: float = 1.0
    """What the term is multiplied with; with 0 it is shown, and decides nothing."""
    name: str | None = None
    """In metrics; null takes the function's name, or "environment"."""


class RewardModelTerm(Section):
    """A term that a reward model says of an episode's prompt and completion."""

    kind: Literal["model"] = "model"
    path: str
    """Folder, or Hugging Face id, of a sequence classifier of one label, as `ludus train-reward`
    writes it. Each rollout worker loads it once, whatever the number of terms."""
    weight: float = 1.0
    """What the term is multiplied with; with 0 it is shown, and decides nothing."""
    name: str | None = None
    """In metrics; null takes the last part of the path."""
    device: str | None = None
    """One of "cpu", "cuda", "cuda:1"; null takes a GPU where the rollout worker has one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its weights."""
    max_tokens_per_batch: PositiveInt = 16384
    """Padded tokens that go through it at once."""


RewardTermConfig = Annotated[
    RewardTerm | RewardModelTerm, Field(discriminator="kind"), default_kind("function")
]


def name_of_term(term: RewardTerm | RewardModelTerm) -> str:
    """What metrics call a term of the reward."""
    if isinstance(term, RewardModelTerm):
        return term.name or term.path.rstrip("/").rpartition("/")[2]
    return term.name or (term.function or "environment").rpartition(":")[2]


class _Environment(Section):
    render: ImportPath | None = None
    """Replaces the environment's text renderer: (observation, first) -> list of messages."""
    parse: ImportPath | None = None
    """Replaces the environment's parser: (text, observation) -> action."""
    tools: bool = False
    """Whether answers call the environment's tools, which the chat template then lists."""
    rollout: RolloutPath | None = None
    """Plays the episodes in place of the usual loop of answers and steps (docs/rewards.md);
    "trl:module:function" plays many in one call, as TRL's rollout functions do
    (docs/from-trl.md)."""
    agent: AgentConfig | None = None
    policies: ImportPath | None = None
    """Fixed policies to compare with: (options) -> {name: policy}."""
    baselines: tuple[str, ...] = ()
    """Fixed policies that play the same seeds as an evaluation, by name; `random` is always
    there."""
    random_policy: str | None = None
    """The baseline at which gap_closed is 0."""
    optimal_policy: str | None = None
    """The baseline at which gap_closed is 1."""
    policy_chart: ImportPath | None = None
    """Situations for the policy chart of the report: () -> list of PolicyChartPrompt."""
    rewards: tuple[RewardTermConfig, ...] = (RewardTerm(),)
    """What an episode is worth: the weighted sum of these terms."""
    weight: PositiveFloat = 1.0
    """Share of the groups that are played here, relative to the other environments."""
    max_turns: PositiveInt | None = None
    """Replaces rollout.max_turns here."""
    max_tokens: PositiveInt | None = None
    """Replaces rollout.max_tokens here; may not be larger."""
    max_completion_tokens: PositiveInt | None = None
    """Replaces rollout.max_completion_tokens here."""
    reconnect_timeout_s: Seconds = 60.0
    """How long a lost server may stay away, or nearly all episodes may fail, before the run
    ends."""
    resume: bool = False
    """Plays episodes again that are lost with their server, up to where they were, instead of
    leaving them out: for servers on machines that may be taken away at any time. The environment
    must be deterministic, and its tools may change nothing outside their session."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.render is None) != (self.parse is None):
            missing = "parse" if self.parse is None else "render"
            raise ValueError(
                "render and parse replace the text renderer together; "
                f"set environment.{missing} too, or remove both"
            )
        if self.tools and self.render is not None:
            raise ValueError(
                "tools = true parses answers as tool calls, and render and parse as something "
                "else; remove the one or the other"
            )
        return self

    @model_validator(mode="after")
    def _ends_of_the_gap_are_played(self) -> Self:
        for field in ("random_policy", "optimal_policy"):
            name = getattr(self, field)
            if name is not None and name not in self.baselines:
                raise ValueError(
                    f"{field} = '{name}' is not played; add it to environment.baselines, "
                    f"now {list(self.baselines)}"
                )
        unknown = [name for name in self.baselines if name != RANDOM_POLICY]
        if unknown and self.policies is None:
            raise ValueError(
                f"baselines = {unknown} needs environment.policies, for example "
                f"'openspiel_env.policies:fixed_policies'; '{RANDOM_POLICY}' alone needs none"
            )
        return self

    @model_validator(mode="after")
    def _worth_something(self) -> Self:
        if not self.rewards:
            raise ValueError(
                "rewards expected at least one term, got none; [{}] is the environment's own return"
            )
        names = [name_of_term(term) for term in self.rewards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"rewards expected terms of different names, got two '{twice[0]}'; "
                "set name in one of them"
            )
        return self

    @model_validator(mode="after")
    def _plays_one_way(self) -> Self:
        if self.rollout is not None and self.agent is not None:
            raise ValueError(
                f"rollout = '{self.rollout}' and agent both play the episodes; remove the one or "
                "the other"
            )
        if self.rollout is not None and (self.tools or self.render is not None):
            other = "tools" if self.tools else "render and parse"
            raise ValueError(
                f"rollout = '{self.rollout}' plays episodes by itself, so {other} would go "
                "unheard; remove the one or the other"
            )
        return self

    @model_validator(mode="after")
    def _is_judged_by_functions(self) -> Self:
        if not self.plays_in_batches:
            return self
        if any(isinstance(term, RewardTerm) and term.function is None for term in self.rewards):
            raise ValueError(
                f"rollout = '{self.rollout}' plays without the environment's own return, so "
                "rewards expected functions alone, got a term without one; set rewards = "
                "[{function = 'module:callable'}]"
            )
        if self.baselines:
            raise ValueError(
                f"rollout = '{self.rollout}' is judged by its rewards, which baselines = "
                f"{list(self.baselines)} have not; remove them"
            )
        return self

    @property
    def plays_in_batches(self) -> bool:
        """Whether a rollout function of TRL's plays many episodes in one call."""
        return self.rollout is not None and self.rollout.startswith(TRL_PREFIX)

    @property
    def rollout_function(self) -> str | None:
        """What `rollout` imports."""
        return None if self.rollout is None else self.rollout.removeprefix(TRL_PREFIX)


class LocalEnvironment(_Environment):
    """A server that the run starts, watches and restarts on this machine."""

    kind: Literal["local"] = "local"
    package: str = "openspiel_env"
    """Installed environment package, or any target that `ludus env serve` takes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the environment is built with, for example {game = "blackjack"}."""
    max_sessions: PositiveInt = 4096
    """Sessions the server holds at once."""


class ClientTls(Section):
    """How servers with TLS are known, and what they are shown; files are read on every node."""

    ca_file: str | None = None
    """The authority that the server's certificate comes from; null trusts the system's."""
    cert_file: str | None = None
    """The certificate that is shown to a server that asks for one."""
    key_file: str | None = None
    """Its private key."""
    server_name: str | None = None
    """The name in the server's certificate, where that is not the host of the address."""

    @model_validator(mode="after")
    def _shows_a_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together, got one; set both or none")
        return self


class RemoteEnvironment(_Environment):
    """A server that runs already."""

    kind: Literal["remote"] = "remote"
    address: str
    """grpc://host:port, ws://host:port or http://host:port."""
    token_env: str = "LUDUS_ENV_TOKEN"
    """Environment variable that holds the bearer token; it may be unset."""
    tls: ClientTls = Field(default_factory=ClientTls)
    """For servers with TLS; all of it may be left out."""


EnvironmentConfig = Annotated[
    LocalEnvironment | RemoteEnvironment, Field(discriminator="kind"), default_kind("local")
]

EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,46}$")]
"""What metrics and reports call an environment of a run."""


class Curriculum(Section):
    """Environments from easy to hard, in the order in which they stand."""

    unlock_at: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Win rate of the hardest open environment at which the next one opens; every environment but
    the last has to say whether its episodes succeed (docs/environments.md)."""
    window_groups: PositiveInt = 64
    """Newest groups of an environment that its win rate is taken over."""
    mastered_weight: Annotated[float, Field(gt=0, le=1)] = 0.25
    """What the weights of the environments below the hardest open one are multiplied with."""


def name_of_environment(tree: dict[str, Any]) -> str:
    """The name of an environment that stands alone, by what it plays, or where it is."""
    options = tree.get("options")
    game = options.get("game") if isinstance(options, dict) else None
    source = game or tree.get("package")
    if source is None and "address" in tree:
        last = _place_at(str(tree["address"]))
    else:
        last = str(source or "openspiel_env").rstrip("/").rpartition("/")[2].rpartition(":")[2]
    name = "".join(c if c.isalnum() or c in "_-" else "-" for c in last).strip("_-")
    return (name.removesuffix("_env") or "environment")[:47]


def _place_at(address: str) -> str:
    """What an address ends with: a path, or a host, which has a port where it is but a number."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return "environment"
    path = parts.path.rstrip("/").removesuffix("/ws")
    if path:
        return path.rpartition("/")[2]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return parts.netloc.rpartition("@")[2]
