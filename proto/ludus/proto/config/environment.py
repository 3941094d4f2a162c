"""Environments of a run: where they run, how the model sees them, and the rewards."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ludus.proto.config.agent import AgentConfig
from ludus.proto.config.section import (
    ImportPath,
    PositiveFloat,
    PositiveInt,
    RolloutPath,
    Seconds,
    Section,
    assume_kind,
)
from ludus.proto.paths import PathText

RANDOM_POLICY = "random"
"""Name of the fixed policy that plays random actions."""


class RewardTerm(Section):
    """A term of an episode's reward: the return of the environment, or a function (or its name)."""

    kind: Literal["function"] = "function"
    function: ImportPath | None = None
    """Reward function. It is called with keyword arguments that are lists with one entry per
    episode of a group that is not void: prompts, completions, and every field of the rollouts
    (docs/rewards.md). It returns one number or None (no reward) per episode. null is the return
    of the environment."""
    weight: float = 1.0
    """Factor of the term. A term with weight 0 is only recorded."""
    name: str | None = None
    """Name in metrics. null takes the name of the function, or "environment"."""
    optional: bool = False
    """Leave only the term out of the sum if it is None for an episode that has a value of another
    term. Otherwise, the whole episode is left out."""


class RewardModelTerm(Section):
    """A term that a reward model computes from an episode's prompt and completion."""

    kind: Literal["model"] = "model"
    path: PathText
    """Folder or Hugging Face id of a sequence classifier with one label, as written by
    `ludus train-reward`. Each rollout worker loads it once, even for several terms."""
    weight: float = 1.0
    """Factor of the term. A term with weight 0 is only recorded."""
    name: str | None = None
    """Name in metrics. null takes the last part of the path."""
    device: str | None = None
    """Device: "cpu", "cuda" or "cuda:1". null takes a GPU if the rollout worker has one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    max_tokens_per_batch: PositiveInt = 16384
    """Maximum number of padded tokens in a batch."""


def _read_function_name(term: Any) -> Any:
    """Return the term of a reward function that is given by its name alone."""
    return {"function": term} if isinstance(term, str) else term


RewardTermConfig = Annotated[
    RewardTerm | RewardModelTerm,
    Field(discriminator="kind"),
    assume_kind("function"),
    BeforeValidator(_read_function_name),
]


def make_reward_term_name(term: RewardTerm | RewardModelTerm) -> str:
    """Return the name of a reward term in metrics; the default comes from its function or path."""
    if isinstance(term, RewardModelTerm):
        return term.name or term.path.rstrip("/").rpartition("/")[2]
    return term.name or (term.function or "environment").rpartition(":")[2]


class _Environment(Section):
    render: ImportPath | None = None
    """Function that replaces the environment's text renderer: (observation, is_first) -> list of
    messages."""
    parse: ImportPath | None = None
    """Function that replaces the environment's parser: (text, observation) -> action."""
    tools: bool = False
    """Let completions call the environment's tools, which the chat template then lists."""
    rollout: RolloutPath | None = None
    """Rollout function that plays the episodes instead of the usual loop (docs/rewards.md).
    "RUNNER:module:function" gives the function to the registered runner of that name, which plays
    many episodes in one call."""
    agent: AgentConfig | None = None
    policies: ImportPath | None = None
    """Function that returns fixed policies for comparison: (options) -> {name: policy}."""
    baselines: tuple[str, ...] = ()
    """Names of the fixed policies that play the same seeds as an evaluation. `random` is always
    available."""
    random_policy: str | None = None
    """Baseline at which gap_closed is 0."""
    optimal_policy: str | None = None
    """Baseline at which gap_closed is 1."""
    policy_chart: ImportPath | None = None
    """Function that returns the situations in the report's policy chart: () -> list of
    PolicyChartPrompt."""
    rewards: tuple[RewardTermConfig, ...] = (RewardTerm(),)
    """Terms of the reward; the reward of an episode is their weighted sum."""
    weight: PositiveFloat = 1.0
    """Relative number of groups that play this environment, compared with the weights of the other
    environments."""
    max_turns: PositiveInt | None = None
    """Maximum number of turns. null takes rollout.max_turns."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of an episode, at most rollout.max_tokens. null takes
    rollout.max_tokens."""
    max_completion_tokens: PositiveInt | None = None
    """Maximum number of tokens of a completion. null takes rollout.max_completion_tokens."""
    invalid_action_reward: float | None = None
    """Reward of a completion that is not a valid action. null takes
    rollout.invalid_action_reward."""
    reconnect_timeout_s: Seconds = 60.0
    """Time in seconds that a lost server may be unreachable, or nearly all episodes may fail,
    before the run stops."""
    resume: bool = False
    """Replay lost episodes up to the point where their server was lost, instead of skipping them.
    Useful for servers on preemptible machines. The environment must be deterministic, and its tools
    must not change anything outside their session."""

    @model_validator(mode="after")
    def _check_renderer(self) -> Self:
        if (self.render is None) != (self.parse is None):
            missing_field = "parse" if self.parse is None else "render"
            raise ValueError(
                "render and parse replace the text renderer together; "
                f"set environment.{missing_field} too, or remove both"
            )
        if self.tools and self.render is not None:
            raise ValueError(
                "tools = true parses completions as tool calls, but render and parse replace that "
                "parser; remove tools, or remove render and parse"
            )
        return self

    @model_validator(mode="after")
    def _check_baselines(self) -> Self:
        for field in ("random_policy", "optimal_policy"):
            name = getattr(self, field)
            if name is not None and name not in self.baselines:
                raise ValueError(
                    f"{field} = '{name}' must be one of environment.baselines, now "
                    f"{list(self.baselines)}; add it there"
                )
        unknown_names = [name for name in self.baselines if name != RANDOM_POLICY]
        if unknown_names and self.policies is None:
            raise ValueError(
                f"baselines = {unknown_names} needs environment.policies, for example "
                f"'openspiel_env.policies:fixed_policies'; only '{RANDOM_POLICY}' works without it"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if not self.rewards:
            raise ValueError(
                "rewards needs at least one term; [{}] is the return of the environment"
            )
        names = [make_reward_term_name(term) for term in self.rewards]
        repeated_names = sorted({name for name in names if names.count(name) > 1})
        if repeated_names:
            raise ValueError(
                f"rewards has two terms with the name '{repeated_names[0]}'; set a different name "
                "in one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_rollout(self) -> Self:
        if self.rollout is not None and self.agent is not None:
            raise ValueError(
                f"rollout = '{self.rollout}' and agent both play the episodes; remove one of them"
            )
        if self.rollout is not None and (self.tools or self.render is not None):
            setting = "tools" if self.tools else "render and parse"
            raise ValueError(
                f"{setting} cannot be combined with rollout = '{self.rollout}', which plays the "
                f"episodes; remove rollout, or remove {setting}"
            )
        return self

    @model_validator(mode="after")
    def _check_batch_rewards(self) -> Self:
        if not self.plays_in_batches:
            return self
        if any(isinstance(term, RewardTerm) and term.function is None for term in self.rewards):
            raise ValueError(
                f"rollout = '{self.rollout}' has no return of the environment, so every term of "
                "rewards needs a function; set rewards = [{function = 'module:callable'}]"
            )
        if self.baselines:
            raise ValueError(
                f"rollout = '{self.rollout}' is evaluated by its rewards, but the policies in "
                f"baselines = {list(self.baselines)} have none; remove baselines"
            )
        return self

    @property
    def plays_in_batches(self) -> bool:
        """True if a registered runner plays many episodes in one call."""
        return self.rollout_runner is not None

    @property
    def rollout_runner(self) -> str | None:
        """The name of the registered runner in `rollout`."""
        names = (self.rollout or "").split(":")
        return names[0] if len(names) == 3 else None

    @property
    def rollout_function(self) -> str | None:
        """The import path in `rollout`."""
        return None if self.rollout is None else ":".join(self.rollout.split(":")[-2:])


class LocalEnvironment(_Environment):
    """A server that the run starts, watches and restarts on this machine."""

    kind: Literal["local"] = "local"
    package: str = "openspiel_env"
    """Installed environment package, or any target of `ludus env serve`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, for example {game = "blackjack"}."""
    max_sessions: PositiveInt = 4096
    """Maximum number of sessions of the server."""


class ClientTls(Section):
    """TLS settings of the connections to a server. Every node reads the files."""

    ca_file: PathText | None = None
    """File of the certificate authority that signed the server's certificate. null trusts the
    authorities of the system."""
    cert_file: PathText | None = None
    """Client certificate, for servers that require it."""
    key_file: PathText | None = None
    """Private key of the client certificate."""
    server_name: str | None = None
    """Name in the server's certificate. null takes the host of the address."""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            missing_field = "key_file" if self.key_file is None else "cert_file"
            raise ValueError(
                f"cert_file and key_file need each other; set {missing_field} too, or remove both"
            )
        return self


class ServerConnection(Section):
    """The address of a running server, and its credentials."""

    kind: Literal["remote"] = "remote"
    address: str
    """Address of the server: grpc://host:port, ws://host:port or http://host:port."""
    token_env: str = "LUDUS_ENV_TOKEN"
    """Name of the environment variable with the bearer token. The variable may be unset."""
    tls: ClientTls = Field(default_factory=ClientTls)
    """TLS settings. Servers without TLS need none."""
    reconnect_timeout_s: Seconds = 60.0
    """Time in seconds that a lost server may be unreachable before the run stops."""


class RemoteEnvironment(ServerConnection, _Environment):
    """A running environment server."""

    reconnect_timeout_s: Seconds = 60.0
    """Time in seconds that a lost server may be unreachable, or nearly all episodes may fail,
    before the run stops."""


EnvironmentConfig = Annotated[
    LocalEnvironment | RemoteEnvironment, Field(discriminator="kind"), assume_kind("local")
]

EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,46}$")]
"""Name of an environment of a run, in metrics and reports."""


class Curriculum(Section):
    """Environments that open one after the other, in the order of the configuration."""

    unlock_at: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Success rate of the hardest open environment at which the next environment opens. Every
    environment except the last must report the success of its episodes (docs/environments.md)."""
    window_groups: PositiveInt = 64
    """Number of newest groups of an environment from which its success rate is computed."""
    mastered_weight: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Factor that multiplies the weights of all open environments except the hardest."""


def make_environment_name(section: dict[str, Any]) -> str:
    """Return the default name of a single environment, from its game, package or address."""
    options = section.get("options")
    game = options.get("game") if isinstance(options, dict) else None
    game_or_package = game or section.get("package")
    if game_or_package is None and "address" in section:
        raw_name = _make_address_name(str(section["address"]))
    else:
        raw_name = (
            str(game_or_package or "openspiel_env")
            .rstrip("/")
            .rpartition("/")[2]
            .rpartition(":")[2]
        )
    name = "".join(char if char.isalnum() or char in "_-" else "-" for char in raw_name).strip("_-")
    return (name.removesuffix("_env") or "environment")[:47]


def _make_address_name(address: str) -> str:
    """Return the last segment of a URL's path, or the host if there is no path.

    The host has its port if it is an IP address.
    """
    try:
        split_address = urlsplit(address)
        host = split_address.hostname or ""
    except ValueError:
        return "environment"
    path = split_address.path.rstrip("/").removesuffix("/ws")
    if path:
        return path.rpartition("/")[2]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return split_address.netloc.rpartition("@")[2]
