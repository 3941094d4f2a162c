"""Environment, model, generator, rollout, learner and weight store of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ludus.proto.config.section import (
    ImportPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    default_kind,
)


class _Environment(Section):
    render: ImportPath | None = None
    """Replaces the environment's text face: (observation, first) -> list of messages."""
    parse: ImportPath | None = None
    """Replaces the environment's parser: (text, observation) -> action."""
    policies: ImportPath | None = None
    """Fixed policies to compare with: (options) -> {name: policy}."""
    probes: ImportPath | None = None
    """Situations for the policy chart of the report: () -> list of PolicyProbe."""
    reconnect_timeout_s: PositiveFloat = 60.0
    """How long a lost server may stay away before the run fails."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.render is None) != (self.parse is None):
            missing = "parse" if self.parse is None else "render"
            raise ValueError(
                "render and parse replace the text face together; "
                f"set environment.{missing} too, or remove both"
            )
        return self


class LocalEnvironment(_Environment):
    """A server that the run starts, watches and restarts on this machine."""

    kind: Literal["local"] = "local"
    package: str = "openspiel_env"
    """Installed environment package; it has `server/app.py` and `make_environment`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the environment is built with, for example {game = "blackjack"}."""
    max_sessions: PositiveInt = 4096
    """Sessions the server holds at once."""


class RemoteEnvironment(_Environment):
    """A server that runs already."""

    kind: Literal["remote"] = "remote"
    address: str
    """grpc://host:port, ws://host:port or http://host:port."""
    token_env: str = "LUDUS_ENV_TOKEN"
    """Environment variable that holds the bearer token; it may be unset."""


EnvironmentConfig = Annotated[
    LocalEnvironment | RemoteEnvironment, Field(discriminator="kind"), default_kind("local")
]


class TinyModel(Section):
    """A Qwen2-shaped model made on the spot, warm-started on random legal answers."""

    kind: Literal["tiny"] = "tiny"
    num_layers: PositiveInt = 2
    """Transformer layers."""
    width: PositiveInt = 128
    """Hidden size; width / num_heads must be at least 32 for vLLM on a CPU."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    intermediate: PositiveInt = 256
    """Hidden size of the feed-forward layers."""
    initializer_range: PositiveFloat = 0.1
    """Standard deviation of the random weights."""
    embedding_range: PositiveFloat = 1.0
    """Standard deviation of the random embeddings; near 1, what differs in a prompt stays visible
    in its last token."""
    vocab_size: Annotated[int, Field(ge=300, le=65536)] = 512
    """Most entries of the byte-level tokenizer, trained on the environment's own text."""
    max_tokens: PositiveInt = 512
    """Longest conversation."""
    tie_embeddings: bool = False
    """Whether input and output embeddings are one matrix."""
    warm_start_games: PositiveInt = 1024
    """Random games whose text teaches the format."""
    warm_start_epochs: PositiveInt = 1
    """Passes over these games."""
    warm_start_layers: Literal["head", "all"] = "head"
    """What the warm start trains. The output head is enough where every answer is legal, and
    leaves the random features, which all of training builds on, as they are."""
    warm_start_learning_rate: PositiveFloat = 3e-2
    """Peak learning rate of the warm start; 3e-3 suits "all"."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width expected a multiple of model.num_heads = {self.num_heads}, "
                f"got {self.width}; set model.width = {self.num_heads * 32}"
            )
        if self.tie_embeddings and self.warm_start_layers == "head":
            raise ValueError(
                "model.tie_embeddings = true makes head and embeddings one matrix, so the head "
                "cannot be trained alone; set model.warm_start_layers = 'all' and "
                "model.warm_start_learning_rate = 0.003"
            )
        return self


class PretrainedModel(Section):
    """A Hugging Face model id, or a folder that `save_pretrained` wrote."""

    kind: Literal["pretrained"] = "pretrained"
    path: str
    """Model id or folder."""
    enable_thinking: bool = False
    """Passed to chat templates that know it (Qwen3): whether the model may think aloud."""


ModelConfig = Annotated[
    TinyModel | PretrainedModel, Field(discriminator="kind"), default_kind("tiny")
]


class VllmGenerator(Section):
    """vLLM, on GPUs and CPUs."""

    kind: Literal["vllm"] = "vllm"
    max_num_seqs: PositiveInt = 256
    """Sequences decoded at once."""
    max_model_tokens: PositiveInt | None = None
    """Longest sequence; null takes rollout.max_tokens."""
    kv_cache_gib: PositiveInt = 1
    """Memory for the KV cache on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a GPU's memory that vLLM may take."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs per rollout worker."""
    enforce_eager: bool = True
    """False compiles the model: slower to start, faster to run on a GPU."""


class TransformersGenerator(Section):
    """Plain transformers: no dependency beyond the learner's own; best for tiny models."""

    kind: Literal["transformers"] = "transformers"
    max_batch_size: PositiveInt = 1024
    """Sequences decoded at once."""


GeneratorConfig = Annotated[
    VllmGenerator | TransformersGenerator, Field(discriminator="kind"), default_kind("transformers")
]


class RolloutConfig(Section):
    """How episodes are played."""

    num_workers: PositiveInt = 1
    """Rollout worker actors, one generator each."""
    num_gpus_per_worker: NonNegativeFloat = 0.0
    """GPUs that Ray reserves for each worker."""
    num_threads: PositiveInt = 1
    """CPU threads of each worker's generator."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Episodes per group: the baseline of an advantage."""
    group_seed: Literal["shared", "independent"] = "shared"
    """Whether the episodes of a group are the same deal."""
    num_groups_in_flight: PositiveInt = 32
    """Groups a worker plays at once."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are taken at it."""
    max_completion_tokens: PositiveInt = 16
    """Tokens of one answer."""
    max_turns: PositiveInt = 32
    """Turns of an episode before it is truncated."""
    max_tokens: PositiveInt = 512
    """Tokens of an episode, prompts included, before it is truncated."""
    invalid_action_reward: float = -1.0
    """Reward of an episode that ends because the text was no action."""
    group_timeout_s: PositiveFloat = 300.0
    """How long a group may take before it is void."""


class LearnerConfig(Section):
    """How the policy is updated."""

    num_ranks: PositiveInt = 1
    """FSDP2 ranks, one Ray actor each."""
    num_gpus_per_rank: NonNegativeFloat = 0.0
    """GPUs that Ray reserves for each rank."""
    num_threads: PositiveInt = 1
    """CPU threads of each rank."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear"] = "constant"
    """Course of the learning rate after the warm-up; linear falls to learning_rate_final."""
    learning_rate_final: NonNegativeFloat = 0.0
    """Learning rate after the last step of a linear schedule."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from zero."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per batch of groups."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Padded tokens that go through the model at once; the loss does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; parameters and optimizer stay float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""


class RayWeightStore(Section):
    """Weights travel through Ray's object store."""

    kind: Literal["ray"] = "ray"
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Versions that stay available."""
    timeout_s: PositiveFloat = 60.0
    """How long a worker may take to hold a published version before the run fails."""


class FolderWeightStore(Section):
    """Weights travel through a folder that all machines share."""

    kind: Literal["folder"] = "folder"
    path: str | None = None
    """Folder; null takes `weights` in the run's folder."""
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Versions that stay on disk."""
    timeout_s: PositiveFloat = 60.0
    """How long a worker may take to hold a published version before the run fails."""


WeightStoreConfig = Annotated[
    RayWeightStore | FolderWeightStore, Field(discriminator="kind"), default_kind("ray")
]
