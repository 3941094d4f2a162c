"""Model, generator, rollout, learner and weight store of a language-model run."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

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
    assume_kind,
)
from ludus.proto.paths import PathText


class LoraConfig(Section):
    """Low-rank adapters. Only the adapters are trained, and sent to rollout workers."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale of each adapter, alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    """Names of the linear layers with an adapter."""


_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a Llama-shaped model, without its head."""


class TinyModel(Section):
    """A small Llama-shaped model, created for the run and warm-started on random legal actions."""

    default_learning_rate: ClassVar[float] = 2e-3
    """Peak learning rate if learner.learning_rate is null."""
    kind: Literal["tiny"] = "tiny"
    num_layers: PositiveInt = 2
    """Number of transformer layers."""
    width: PositiveInt = 128
    """Hidden size. vLLM on a CPU needs width / num_heads of at least 32."""
    num_heads: PositiveInt = 4
    """Number of attention heads."""
    intermediate: PositiveInt = 256
    """Hidden size of the feed-forward layers."""
    initializer_range: PositiveFloat = 0.1
    """Standard deviation of the random weights."""
    embedding_range: PositiveFloat = 1.0
    """Standard deviation of the random embeddings. Near 1, differences between prompts remain
    visible in the last token."""
    vocab_size: Annotated[int, Field(ge=300, le=65536)] = 512
    """Maximum size of the vocabulary of the byte-level tokenizer, which is trained on text of the
    environment."""
    max_tokens: PositiveInt = 512
    """Maximum number of tokens of a conversation."""
    lora: LoraConfig | None = None
    tie_embeddings: bool = False
    """Use one matrix for the input and output embeddings."""
    warm_start_games: PositiveInt = 1024
    """Number of random episodes whose text teaches the format of actions."""
    warm_start_epochs: PositiveInt = 1
    """Number of passes over these episodes."""
    warm_start_layers: Literal["head", "all"] = "head"
    """Layers that the warm start trains. The output head is enough if the same actions are always
    legal, and keeps the random features that training builds on."""
    warm_start_learning_rate: LearningRate = 3e-2
    """Peak learning rate of the warm start. Use 3e-3 for warm_start_layers = "all"."""

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        missing_layers = sorted(set(self.lora.targets) - set(_LINEAR_LAYERS)) if self.lora else []
        if missing_layers:
            raise ValueError(
                f"model.lora.targets: a tiny model has no linear layer {missing_layers}; it has "
                f"{list(_LINEAR_LAYERS)}"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width = {self.width} must be a multiple of model.num_heads = "
                f"{self.num_heads}; set model.width = {self.num_heads * 32}"
            )
        if self.width // self.num_heads % 2:
            raise ValueError(
                f"model.width = {self.width} / model.num_heads = {self.num_heads} is "
                f"{self.width // self.num_heads}, but rotary embeddings need an even number per "
                f"head; set model.width = {self.num_heads * 32}"
            )
        if self.tie_embeddings and self.warm_start_layers == "head":
            raise ValueError(
                "model.tie_embeddings = true uses one matrix for the head and the embeddings, so "
                "the head cannot be trained alone; set model.warm_start_layers = 'all' and "
                "model.warm_start_learning_rate = 0.003"
            )
        return self


class PretrainedModel(Section):
    """A Hugging Face model."""

    default_learning_rate: ClassVar[float] = 1e-5
    """Peak learning rate if learner.learning_rate is null."""
    kind: Literal["pretrained"] = "pretrained"
    path: PathText
    """Model id, or a folder written by `save_pretrained`."""
    enable_thinking: bool = False
    """Let the model write its reasoning before its action. Passed to chat templates that support
    the option (Qwen3)."""
    keep_thinking: bool = True
    """Keep the reasoning of earlier turns in the conversation. If the template removes it, each
    turn becomes a separate sequence."""
    chat_template: str | None = None
    """Jinja file with the chat template of the model, for a base model without a template or to
    replace one. The run folder and exported models contain it. null takes the model's own."""
    lora: LoraConfig | None = None


ModelConfig = Annotated[
    TinyModel | PretrainedModel, Field(discriminator="kind"), assume_kind("tiny")
]


class VllmGenerator(Section):
    """vLLM, on GPUs and CPUs."""

    kind: Literal["vllm"] = "vllm"
    max_num_seqs: PositiveInt = 256
    """Maximum number of sequences decoded at once."""
    max_model_tokens: PositiveInt | None = None
    """Maximum number of tokens of a sequence. null takes rollout.max_tokens."""
    kv_cache_gib: PositiveInt | None = None
    """Memory for the KV cache of each CPU or GPU, in GiB. null takes 1 on a CPU. On a GPU, null
    takes what the model and its computation leave of gpu_memory_utilization, as vLLM measures it.
    Set a number if the learner shares the GPU, because the learner's memory may change during the
    measurement."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a GPU's memory that vLLM may use. Has no effect if kv_cache_gib is set."""
    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs per rollout worker."""
    enforce_eager: bool = True
    """Run the model without compilation. false starts slower and runs faster on a GPU."""


class TransformersGenerator(Section):
    """Hugging Face transformers. Needs no additional package, and is best for tiny models."""

    kind: Literal["transformers"] = "transformers"
    max_batch_size: PositiveInt = 1024
    """Maximum number of sequences decoded at once."""
    kv_cache_mib: PositiveInt = 2048
    """Memory for the keys and values of the sequences decoded at once, in MiB. Other requests wait.
    When requests join, up to twice as much is in use for a moment."""
    prefix_cache_mib: NonNegativeInt = 256
    """Memory for the keys and values of completed turns, in MiB. The next turn of a conversation
    computes only its new tokens. 0 computes all tokens again."""


GeneratorConfig = Annotated[
    VllmGenerator | TransformersGenerator, Field(discriminator="kind"), assume_kind("transformers")
]


class RolloutConfig(Section):
    """Sampling and limits of episodes."""

    num_workers: PositiveInt = 1
    """Number of rollout workers, with one generator each."""
    num_gpus_per_worker: NumGpus = 0.0
    """Number of GPUs that Ray reserves for each worker."""
    min_workers: PositiveInt = 1
    """Number of workers that the run needs to start and to continue. Other workers join when the
    cluster has room."""
    num_threads: NumThreads | None = None
    """Number of CPU threads of each worker's generator. null takes 1 for models of a width below
    256, on a GPU and in a Ray cluster; otherwise this machine's cores, or OMP_NUM_THREADS, divided
    by the number of workers and ranks if training.max_staleness > 0, and by the larger of the two
    numbers if it is 0."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Number of episodes per group."""
    group_seed: Literal["shared", "independent"] = "shared"
    """Seeds of a group: one seed for all of its episodes, or a different seed for each."""
    num_groups_in_flight: PositiveInt = 32
    """Number of groups that a worker plays at once."""
    temperature: Temperature = 1.0
    """Sampling temperature. Log-probs are computed at this temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens whose total probability is top_p. 1 samples from all
    tokens."""
    top_k: NonNegativeInt = 0
    """Sample from the top_k most probable tokens. 0 samples from all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens with at least this share of the highest token probability. 0 samples from
    all tokens."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Penalty for tokens that already occur in the prompt or the completion: their positive logits
    are divided by it, their negative logits multiplied. 1 changes nothing."""
    constrain: Literal["none", "legal_answers"] = "none"
    """Restriction of completions: none; or "legal_answers", which samples only the answers that the
    environment lists as legal in its current state, in training and in evaluations. Log-probs,
    entropies and divergences are those of the restricted distribution (docs/algorithms.md)."""
    max_completion_tokens: PositiveInt = 16
    """Maximum number of tokens of a completion."""
    max_turns: PositiveInt = 32
    """Maximum number of turns; longer episodes are truncated."""
    max_tokens: PositiveInt = 512
    """Maximum number of tokens of an episode, prompts included; longer episodes are truncated."""
    overlong: Literal["train", "mask", "penalise"] = "train"
    """Treatment of episodes that a limit on tokens or turns cut off: trained on; masked, so that
    their rewards count in baselines only; or penalised for their length (docs/rewards.md)."""
    invalid_action_reward: float | None = None
    """Reward of a completion that is not a valid action. It ends the episode (docs/rewards.md).
    null takes min(lowest, 0) - max(highest, (highest - lowest) / 2), where lowest and highest are
    the returns that the environment declares, or -1 if it declares none or its return is not part
    of the reward."""
    group_timeout_s: Seconds = 300.0
    """Time limit in seconds of a group, and of an episode in an evaluation. After that, it is
    void."""
    generate_port: Port | None = None
    """Loopback port on which the runner of a rollout function serves POST /generate/. The runner
    takes a free port if this one is in use, or if it is 0. null opens no port."""

    @property
    def known_num_threads(self) -> int:
        """The number of CPU threads of each worker; 1 if it was not chosen yet."""
        return self.num_threads or 1

    @property
    def known_invalid_action_reward(self) -> float:
        """The reward of a completion that is not a valid action; -1 if it was not chosen yet."""
        return -1.0 if self.invalid_action_reward is None else self.invalid_action_reward

    @property
    def changed_distribution(self) -> tuple[str, float, str] | None:
        """Name, value and effect of the setting that changes the distribution of the samples.

        None if samples come from the model's distribution at the sampling temperature.
        """
        changes = (
            ("top_p", self.top_p, 1, "cut-off"),
            ("top_k", self.top_k, 0, "cut-off"),
            ("min_p", self.min_p, 0, "cut-off"),
            ("repetition_penalty", self.repetition_penalty, 1, "changed"),
        )
        return next(
            (
                (field, value, effect)
                for field, value, neutral_value, effect in changes
                if value != neutral_value
            ),
            None,
        )


DEFAULT_MAX_TOKENS_PER_MICRO_BATCH = 16384
"""Maximum number of tokens in a micro-batch if memory does not limit it."""


class LearnerMemoryConfig(Section):
    """Settings of the learner that take more time and less memory."""

    reduce_gradients: Literal["each", "last"] | None = None
    """Micro-batches of an update after which the ranks add up their gradients. With "each", a rank
    keeps only its shard of the sum. With "last", it keeps a whole copy until the last micro-batch,
    and the ranks communicate less. null takes "each" above one billion trained parameters."""

    def reduces_each(self, num_trained: int) -> bool:
        """Return whether the ranks add up gradients after each micro-batch of an update.

        Args:
            num_trained: number of trained parameters on all ranks.
        """
        if self.reduce_gradients is None:
            return num_trained > 10**9
        return self.reduce_gradients == "each"


class LearnerConfig(Section):
    """Updates of the policy."""

    num_ranks: PositiveInt = 1
    """Number of FSDP2 ranks, each a Ray actor."""
    num_gpus_per_rank: NumGpus = 0.0
    """Number of GPUs that Ray reserves for each rank."""
    num_threads: NumThreads | None = None
    """Number of CPU threads of each rank. null chooses as rollout.num_threads does."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of AdamW. null takes 2e-3 for a tiny model and 1e-5 for a pretrained
    model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up. "linear" and "cosine" decay to
    learning_rate_final."""
    learning_rate_final: NonNegativeFloat = 0.0
    """Learning rate of the last step, if the schedule is not constant."""
    warmup_steps: NonNegativeInt = 0
    """Number of training steps over which the learning rate rises from zero."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's running means."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of the gradients; larger gradients are scaled down."""
    num_minibatches: PositiveInt = 1
    """Number of minibatches, and thus of optimizer updates, per pass over a batch."""
    update_epochs: PositiveInt = 1
    """Number of passes over a batch. All passes use the old log-probs, values and advantages from
    the start of the training step."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Maximum number of padded tokens in a micro-batch. The loss does not depend on it. null takes
    16384, or in a run of `ludus train` less if a rank has too little memory (docs/memory.md)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation, and of frozen weights under adapters. All other parameters and the
    optimizer state are always float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    packing: Literal["tree", "pad"] = "tree"
    """Layout of sequences in a micro-batch: "tree" computes common prefixes once, "pad" pads every
    sequence to the longest."""
    compile: bool = False
    """Compile the model's layers with torch.compile. Starts slower and runs faster on a GPU."""
    offload_reference: bool = False
    """Move the reference model to main memory while it is not used."""
    collective_timeout_s: Seconds = 600.0
    """Time in seconds that a rank waits for the other ranks before all ranks are restarted."""
    memory: LearnerMemoryConfig = LearnerMemoryConfig()

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.num_ranks > 1 and 0 < self.num_gpus_per_rank < 1:
            raise ValueError(
                f"learner.num_gpus_per_rank = {self.num_gpus_per_rank:g} with learner.num_ranks = "
                f"{self.num_ranks} puts several ranks on one GPU, which NCCL refuses; set "
                "num_gpus_per_rank = 1, or num_ranks = 1"
            )
        return self

    @property
    def known_num_threads(self) -> int:
        """The number of CPU threads of each rank; 1 if it was not chosen yet."""
        return self.num_threads or 1

    @property
    def known_max_tokens_per_micro_batch(self) -> int:
        """The maximum number of tokens in a micro-batch; the default if it was not chosen yet."""
        return self.max_tokens_per_micro_batch or DEFAULT_MAX_TOKENS_PER_MICRO_BATCH


class CanaryConfig(Section):
    """Limits for the difference between a worker's and the learner's canary log-probs.

    In float32, `tolerance` is used, and correct log-probs differ by rounding only. If the learner
    computes in reduced precision, or weights are sent in reduced precision, correct log-probs
    differ more. Then floor, factor and window define which differences are unusual.
    """

    quantile: Annotated[float, Field(gt=0, le=1)] | None = None
    """Quantile of the differences of all tokens that is checked; 1 is the largest difference. null
    takes the largest in float32, and the mean in reduced precision."""
    tolerance: PositiveFloat | None = None
    """Largest difference that passes, in nats. null takes 0.5 in reduced precision. In float32,
    null takes factor times the rounding error that the learner measures for its weights, but at
    least 1e-4 and at most 0.01."""
    floor: NonNegativeFloat = 0.05
    """Largest difference that always passes in reduced precision, in nats."""
    factor: Annotated[float, Field(ge=1)] = 4.0
    """Largest ratio of a difference to the usual difference that passes in reduced precision, for
    differences above floor. In float32, the ratio to the measured rounding error."""
    window: NonNegativeInt = 64
    """Number of newest passing differences, of all workers, whose median is the usual difference.
    0 turns the comparison with the usual difference off."""
    max_breaches: PositiveInt = 4
    """Number of consecutive failed checks of one worker, including its replacements, that stop the
    run. After its first failed check, the worker goes out of rotation and fetches the weights from
    scratch. After its second, it is replaced, or the run stops if no other worker passes."""


class _WeightStore(Section):
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Number of newest versions that stay available, with all versions that they are based on."""
    timeout_s: Seconds = 120.0
    """Time limit in seconds for publishing a version, and for loading it in a worker. A worker that
    takes longer goes out of rotation and fetches the weights from scratch. The run fails if no
    worker loads the version. A shorter outage of the store only delays the run."""
    dtype: Literal["learner", "float32", "bfloat16"] = "learner"
    """Type of the published tensors. "learner" takes learner.dtype."""
    full_every: PositiveInt = 1
    """Number of versions from one full version to the next; the versions between contain only
    changes. Above 1, learner and workers keep a copy of the last version in memory."""
    canary: CanaryConfig = CanaryConfig()

    def choose_dtype(self, learner_dtype: str) -> str:
        """Return the type of the published tensors if the learner computes in `learner_dtype`."""
        return learner_dtype if self.dtype == "learner" else self.dtype


class RayWeightStore(_WeightStore):
    """Ray's object store."""

    kind: Literal["ray"] = "ray"


class FolderWeightStore(_WeightStore):
    """A folder that all machines share."""

    kind: Literal["folder"] = "folder"
    path: PathText | None = None
    """Parent folder; each run creates a folder with its name and id there. null takes `weights` in
    the run folder."""


class S3WeightStore(_WeightStore):
    """An S3-compatible object store.

    Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or the identity
    of a pod), never from a configuration.
    """

    kind: Literal["s3"] = "s3"
    bucket: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    """Name of an existing bucket."""
    prefix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!_.*'()/-]{0,256}$")] = "ludus"
    """Prefix of all keys. The name and id of the run follow it."""
    endpoint: str | None = None
    """URL of the store, for example http://127.0.0.1:9000. null takes Amazon S3."""
    region: str = "us-east-1"
    """Region of the bucket."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        # Endpoints appear in logs and messages, so they must not contain secrets. For the same
        # reason, the message does not repeat the value.
        if endpoint is None or re.fullmatch(r"https?://[^/@?#\s]+/?", endpoint):
            return endpoint
        raise ValueError(
            "weights.endpoint must be a URL of scheme, host and port only, for example "
            "https://storage.example:9000; credentials come from AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY in the environment"
        )


WeightStoreConfig = Annotated[
    RayWeightStore | FolderWeightStore | S3WeightStore,
    Field(discriminator="kind"),
    assume_kind("ray"),
]


class PlacementConfig(Section):
    """Placement of the run's actors on the nodes of a Ray cluster, and the memory of the nodes."""

    learner_ranks: Literal["pack", "strict_pack"] = "pack"
    """Placement of the learner's ranks: "pack" takes as few nodes as possible, "strict_pack" takes
    exactly one node. No effect on one machine."""
    join_timeout_s: NonNegativeFloat = 60.0
    """Time in seconds that a run waits for nodes that no autoscaler is adding."""
    start_timeout_s: Seconds = 1800.0
    """Time limit in seconds for starting the learner's ranks: placement, connection and loading of
    the model. The same limit applies to rollout.min_workers workers becoming ready, and to each
    placed worker loading the model and building its engine."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of each GPU in GiB, for the estimate of the memory that the run needs
    (docs/memory.md). null asks the GPUs of this machine; in a cluster it is then unknown."""
    node_memory_gib: PositiveFloat | None = None
    """Main memory of each node, or pod, in GiB, for the same estimate. null takes that of this
    machine or pod; in a cluster it is then unknown."""
