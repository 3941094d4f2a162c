"""Model, generator, rollout, learner and weight store of a run."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from ludus.proto.config.network import NetworkModel
from ludus.proto.config.section import (
    DecayRate,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    NumGpus,
    NumThreads,
    Port,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Temperature,
    default_kind,
)


class LoraConfig(Section):
    """Low-rank adapters: they alone are trained, and they alone travel to the workers."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    """Names of the linear layers that get an adapter."""


_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a Llama-shaped model, apart from its head."""


class TinyModel(Section):
    """A Llama-shaped model made on the spot, warm-started on random legal answers."""

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
    lora: LoraConfig | None = None
    tie_embeddings: bool = False
    """Whether input and output embeddings are one matrix."""
    warm_start_games: PositiveInt = 1024
    """Random games whose text teaches the format."""
    warm_start_epochs: PositiveInt = 1
    """Passes over these games."""
    warm_start_layers: Literal["head", "all"] = "head"
    """What the warm start trains. The output head is enough where every answer is legal, and
    leaves the random features, which all of training builds on, as they are."""
    warm_start_learning_rate: LearningRate = 3e-2
    """Peak learning rate of the warm start; 3e-3 suits "all"."""

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        missing = sorted(set(self.lora.targets) - set(_LINEAR_LAYERS)) if self.lora else []
        if missing:
            raise ValueError(
                f"model.lora.targets: a tiny model has no linear layer {missing}; it has "
                f"{list(_LINEAR_LAYERS)}"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width expected a multiple of model.num_heads = {self.num_heads}, "
                f"got {self.width}; set model.width = {self.num_heads * 32}"
            )
        if self.width // self.num_heads % 2:
            raise ValueError(
                f"model.width = {self.width} over model.num_heads = {self.num_heads} expected an "
                "even number for each head, whose halves are turned together, got "
                f"{self.width // self.num_heads}; set model.width = {self.num_heads * 32}"
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
    keep_thinking: bool = True
    """Whether thoughts of earlier turns stay in the conversation, as they were sampled. Where
    the template strips them, each turn becomes a sequence of its own."""
    lora: LoraConfig | None = None


ModelConfig = Annotated[
    TinyModel | PretrainedModel | NetworkModel, Field(discriminator="kind"), default_kind("tiny")
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
    num_gpus_per_worker: NumGpus = 0.0
    """GPUs that Ray reserves for each worker."""
    min_workers: PositiveInt = 1
    """Workers with which the run begins and continues; others join as soon as there is room."""
    num_threads: NumThreads = 1
    """CPU threads of each worker's generator."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Episodes per group: the baseline of an advantage."""
    group_seed: Literal["shared", "independent"] = "shared"
    """Whether the episodes of a group begin from the same seed, or each from its own."""
    num_groups_in_flight: PositiveInt = 32
    """Groups a worker plays at once."""
    temperature: Temperature = 1.0
    """Sampling temperature; log-probs are taken at it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples from the likeliest tokens that hold this probability."""
    top_k: NonNegativeInt = 0
    """Samples from so many of the likeliest tokens; 0 from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Samples from tokens of at least this share of the likeliest token's probability."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides the positive logits of tokens that prompt or answer have already, and multiplies
    the negative ones; 1 leaves them alone."""
    max_completion_tokens: PositiveInt = 16
    """Tokens of one answer."""
    max_turns: PositiveInt = 32
    """Turns of an episode before it is truncated."""
    max_tokens: PositiveInt = 512
    """Tokens of an episode, prompts included, before it is truncated."""
    invalid_action_reward: float = -1.0
    """What an answer earns that was no action; it ends the episode (docs/rewards.md)."""
    group_timeout_s: Seconds = 300.0
    """How long a group, or a game of an evaluation, may take before it is void."""
    generate_port: Port | None = None
    """Loopback port on which each rollout worker answers POST /generate/ as `trl vllm-serve`
    does (docs/from-trl.md); a worker that finds it taken takes a free one, and so does 0. Null
    opens none."""

    @property
    def changed_distribution(self) -> tuple[str, float, str] | None:
        """The field, its value and its effect, that keeps samples from the model's distribution.

        None where nothing but the temperature stands between the two.
        """
        changes = (
            ("top_p", self.top_p, 1, "cut-off"),
            ("top_k", self.top_k, 0, "cut-off"),
            ("min_p", self.min_p, 0, "cut-off"),
            ("repetition_penalty", self.repetition_penalty, 1, "changed"),
        )
        return next(((f, value, how) for f, value, plain, how in changes if value != plain), None)


class LearnerConfig(Section):
    """How the policy is updated."""

    num_ranks: PositiveInt = 1
    """FSDP2 ranks, one Ray actor each."""
    num_gpus_per_rank: NumGpus = 0.0
    """GPUs that Ray reserves for each rank."""
    num_threads: NumThreads = 1
    """CPU threads of each rank."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate of AdamW; where nothing is said, 2e-3 for a tiny model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine fall to
    learning_rate_final, one evenly, the other slowly at both ends."""
    learning_rate_final: NonNegativeFloat = 0.0
    """Learning rate of the last step, unless the schedule is constant."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from zero."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch of groups."""
    update_epochs: PositiveInt = 1
    """Passes over a batch of groups; the log-probs that the ratio starts at, the values and the
    advantages stay those of its beginning."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Padded tokens that go through the model at once; the loss does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; parameters and optimizer stay float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    packing: Literal["tree", "pad"] = "tree"
    """How sequences share a forward pass: as a tree in which a common prefix is computed once,
    or side by side, padded to the longest."""
    compile: bool = False
    """Compile the model's layers with torch.compile: slower to start, faster to run on a GPU."""
    offload_reference: bool = False
    """Keep the reference model in main memory while it is not used."""
    collective_timeout_s: Seconds = 600.0
    """How long a rank waits for the others before the group is restarted."""

    @model_validator(mode="after")
    def _weights_decay_towards_zero(self) -> Self:
        if self.learning_rate * self.weight_decay >= 1:
            raise ValueError(
                f"weight_decay = {self.weight_decay:g} times learning_rate = "
                f"{self.learning_rate:g} is what each step takes off every weight, expected less "
                "than 1; lower weight_decay, which is 0 to 0.1 as a rule"
            )
        return self


class CanaryConfig(Section):
    """When a worker's log-probs of the canary prompts differ too much from the learner's.

    In float32 `tolerance` alone counts. Where the learner computes or weights travel in a reduced
    precision, right answers differ too, and floor, factor and window say how unusual one may be.
    """

    quantile: Annotated[float, Field(gt=0, le=1)] | None = None
    """Which of the tokens' differences is judged, from the smallest to 1, the largest; null takes
    the largest in float32, and the mean in reduced precision."""
    tolerance: PositiveFloat | None = None
    """Largest difference that passes, in nats; null is 1e-4 in float32 and 0.5 in reduced
    precision."""
    floor: NonNegativeFloat = 0.05
    """In reduced precision: difference that is never unusual, in nats."""
    factor: Annotated[float, Field(ge=1)] = 4.0
    """In reduced precision: a difference above floor passes up to so many times the usual one."""
    window: NonNegativeInt = 64
    """Newest answers that passed, of all workers, whose median is the usual difference; 0 turns
    that off."""
    max_breaches: PositiveInt = 4
    """Wrong answers of one worker in a row, its replacements included, that end the run. After
    the first it takes no traffic and fetches from scratch, after the second it is replaced; where
    no other worker answers rightly, the second ends the run."""


class _WeightStore(Section):
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Newest versions that stay available, with all they build upon."""
    timeout_s: Seconds = 120.0
    """How long a version may take to be published, and how long to be held by a worker. A worker
    that takes longer gets no traffic, and fetches once more from scratch; the run fails where
    none comes to hold it. A store that is unavailable for less only delays it."""
    dtype: Literal["learner", "float32", "bfloat16"] = "learner"
    """Type of the tensors that travel; "learner" is learner.dtype."""
    full_every: PositiveInt = 1
    """Versions from one that travels whole to the next; those between travel as what has changed.
    Above 1, learner and workers keep a copy of the last version in memory."""
    canary: CanaryConfig = CanaryConfig()

    def travelling_dtype(self, learner_dtype: str) -> str:
        """The type of the tensors that travel, where the learner computes in `learner_dtype`."""
        return learner_dtype if self.dtype == "learner" else self.dtype


class RayWeightStore(_WeightStore):
    """Weights travel through Ray's object store."""

    kind: Literal["ray"] = "ray"


class FolderWeightStore(_WeightStore):
    """Weights travel through a folder that all machines share."""

    kind: Literal["folder"] = "folder"
    path: str | None = None
    """Folder, in which each run makes one of its name and id; null takes `weights` in the run's
    own."""


class S3WeightStore(_WeightStore):
    """Weights travel through an S3-compatible object store.

    Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, a pod's
    identity), never from a configuration.
    """

    kind: Literal["s3"] = "s3"
    bucket: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    """Bucket; it must exist."""
    prefix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!_.*'()/-]{0,256}$")] = "ludus"
    """First part of all keys; the run's name and id follow."""
    endpoint: str | None = None
    """URL of a store that is not Amazon's, for example http://127.0.0.1:9000."""
    region: str = "us-east-1"
    """Region of the bucket."""

    @field_validator("endpoint")
    @classmethod
    def _names_a_place_only(cls, endpoint: str | None) -> str | None:
        # Endpoints stand in logs and messages, so nothing secret may stand in them. The value
        # is not repeated here for the same reason.
        if endpoint is None or re.fullmatch(r"https?://[^/@?#\s]+/?", endpoint):
            return endpoint
        raise ValueError(
            "weights.endpoint expected a URL of scheme, host and port alone, like "
            "https://storage.example:9000; credentials come from AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY in the environment"
        )


WeightStoreConfig = Annotated[
    RayWeightStore | FolderWeightStore | S3WeightStore,
    Field(discriminator="kind"),
    default_kind("ray"),
]


class PlacementConfig(Section):
    """Which nodes of a Ray cluster the actors of a run get; one machine has no choice."""

    learner_ranks: Literal["pack", "strict_pack"] = "pack"
    """How the learner's ranks share nodes: as few as have room, or one and no other."""
    join_timeout_s: NonNegativeFloat = 60.0
    """How long a run waits for nodes that it needs, and that no autoscaler is about to bring."""
    start_timeout_s: Seconds = 1800.0
    """How long the learner's ranks may take to start: to get their room, to meet, and to load the
    model. As long rollout.min_workers may take until they are ready, and each worker that has its
    room to load the model and to build its engine."""


class PrometheusSink(Section):
    """Metrics for Prometheus, served by the run's driver."""

    port: Port = 0
    """Port on which /metrics is served; 0 takes a free one, which trainer.log names."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 in a cluster, where a network policy guards it."""


class WandbSink(Section):
    """Metrics for Weights & Biases; the key comes from WANDB_API_KEY."""

    project: str = "ludus"
    """Project of the run."""
    entity: str | None = None
    """Team or user; null is the key's own."""
    mode: Literal["online", "offline"] = "online"
    """Offline writes into the run's folder, to be sent later with `wandb sync`."""


class MetricsConfig(Section):
    """Where metrics go beside metrics.jsonl, and what is kept of the episodes."""

    transcripts_per_step: NonNegativeInt = 4
    """Episodes of each training step that go to transcripts.jsonl, word for word."""
    prometheus: PrometheusSink | None = None
    tensorboard: bool = False
    """Whether event files are written into the run's folder."""
    wandb: WandbSink | None = None
