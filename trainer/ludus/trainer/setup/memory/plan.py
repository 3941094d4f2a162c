"""The memory plan of a run: what each owner needs at most, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ludus.proto.config import (
    DEFAULT_MAX_TOKENS_PER_MICRO_BATCH,
    LanguageModelRun,
    ModelCritic,
    PpoConfig,
    RayWeightStore,
)
from ludus.proto.memory_plan import MemoryPart, MemoryPlan, MemoryUse
from ludus.trainer.setup.memory.learner import RankMemory
from ludus.trainer.setup.memory.machine import GIB, Machine
from ludus.trainer.setup.memory.shape import ModelShape, measure_path, measure_shape
from ludus.trainer.setup.memory.worker import WorkerMemory

GPU, MAIN_MEMORY = "GPU", "main memory"
PROGRAM_BYTES = 350_000_000
"""Private main memory of a process with torch, transformers and Ray, before it loads a model."""
CUDA_BYTES = GIB
"""Memory of a GPU for the context of a process, its libraries and its kernels."""
_COMFORTABLE_SHARE = 0.9
"""Share of the memory up to which a micro-batch is chosen, because allocators waste some."""
_MAX_RANKS_PER_NODE = 8
"""Number of ranks that a node of a cluster is assumed to hold."""


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of all actors of a run on a machine."""

    run: LanguageModelRun
    machine: Machine
    rank: RankMemory
    worker: WorkerMemory

    @classmethod
    def measure(cls, run: LanguageModelRun, machine: Machine) -> RunMemory:
        """Read the sizes of the models.

        Raises:
            NotFoundError: there is no model.
        """
        shape = measure_shape(run.model)
        rank = RankMemory(run, shape, _measure_critic(run, shape))
        return cls(run, machine, rank, WorkerMemory(run, shape, rank.published_bytes))

    @property
    def shares_gpu(self) -> bool:
        """True if a rank and a worker compute on the same GPU."""
        shares = (self.run.learner.num_gpus_per_rank, self.run.rollout.num_gpus_per_worker)
        return all(0 < share < 1 for share in shares) and not self.machine.has_several_gpus

    @property
    def num_node_ranks(self) -> int:
        """Number of ranks on the node of rank 0."""
        num_ranks = self.run.learner.num_ranks
        if self.machine.is_whole_run or self.run.placement.learner_ranks == "strict_pack":
            return num_ranks
        return min(num_ranks, _MAX_RANKS_PER_NODE)

    @property
    def num_node_workers(self) -> int:
        """Number of workers on the node of rank 0."""
        return self.run.rollout.num_workers if self.machine.is_whole_run else 0

    def make_plan(self) -> MemoryPlan:
        """Return the plan, with a micro-batch that fits if the configuration sets none."""
        max_tokens = self.run.learner.max_tokens_per_micro_batch
        if max_tokens is None:
            max_tokens = self._choose_max_tokens()
        return MemoryPlan(
            uses=tuple(self.list_uses(max_tokens)), max_tokens_per_micro_batch=max_tokens
        )

    def list_uses(self, max_tokens: int) -> Iterator[MemoryUse]:
        """Yield the memory of a rank, of a worker, of a GPU that both share, and of a node."""
        gpu_bytes, node_bytes = self.machine.gpu_bytes, self.machine.node_bytes
        rank_parts = self.rank.list_step_parts(max_tokens)
        worker_parts = self.worker.list_engine_parts(gpu_bytes)
        rank_on_gpu, worker_on_gpu = self.rank.is_on_gpu, self.worker.is_on_gpu
        if rank_on_gpu:
            rank_parts = [*rank_parts, MemoryPart(name="CUDA", num_bytes=CUDA_BYTES)]
        if worker_on_gpu and self.worker.reserves_memory:
            worker_parts = [*worker_parts, MemoryPart(name="CUDA", num_bytes=CUDA_BYTES)]
        yield MemoryUse(
            owner="learner rank",
            memory_kind=GPU if rank_on_gpu else MAIN_MEMORY,
            parts=tuple(rank_parts),
            num_available_bytes=gpu_bytes if rank_on_gpu and not self.shares_gpu else None,
            remedy=self._make_rank_remedy(max_tokens),
        )
        yield MemoryUse(
            owner="rollout worker",
            memory_kind=GPU if worker_on_gpu else MAIN_MEMORY,
            parts=tuple(worker_parts),
            num_available_bytes=gpu_bytes if worker_on_gpu and not self.shares_gpu else None,
            remedy="set generator.kv_cache_gib to less, or raise generator.tensor_parallel_size",
        )
        if self.shares_gpu:
            yield MemoryUse(
                owner="rank and worker",
                memory_kind=GPU,
                parts=_sum_owners({"learner rank": rank_parts, "rollout worker": worker_parts}),
                num_available_bytes=gpu_bytes,
                remedy=f"set generator.kv_cache_gib, or {self._make_rank_remedy(max_tokens)}",
            )
        yield MemoryUse(
            owner="node",
            memory_kind=MAIN_MEMORY,
            parts=self._list_node_parts(max_tokens),
            num_available_bytes=node_bytes,
            remedy="use a node with more memory, or fewer ranks and workers"
            if rank_on_gpu
            else self._make_rank_remedy(max_tokens),
        )

    def _list_node_parts(self, max_tokens: int) -> tuple[MemoryPart, ...]:
        """Return the parts of main memory on the node of rank 0, at the larger of two times.

        In a step, ranks on the CPU need their whole step. In a publication, rank 0 gathers the
        weights, and the gradients do not exist.
        """
        rank, num_ranks, num_workers = self.rank, self.num_node_ranks, self.num_node_workers
        step_bytes = published_bytes = 0
        if not rank.is_on_gpu:
            step_bytes = num_ranks * rank.step_bytes(max_tokens)
            published_bytes = num_ranks * (rank.save_bytes() + rank.reference_bytes)
        else:
            step_bytes = published_bytes = num_ranks * rank.offloaded_bytes
        publication_bytes = published_bytes + rank.staging_bytes
        learner_name = "learner ranks" if step_bytes >= publication_bytes else "publication"
        worker_parts = self.worker.list_staging_parts()
        if not self.worker.is_on_gpu:
            worker_parts += self.worker.list_engine_parts(None)
        num_programs = 1 + num_ranks + num_workers
        sizes = {
            learner_name: max(step_bytes, publication_bytes),
            "rollout workers": num_workers * sum(part.num_bytes for part in worker_parts),
            "programs": num_programs * PROGRAM_BYTES,
        }
        if isinstance(self.run.weights, RayWeightStore):
            num_versions = self.run.weights.keep_versions + 1
            sizes["stored weights"] = num_versions * rank.published_bytes
        return tuple(MemoryPart(name=name, num_bytes=size) for name, size in sizes.items() if size)

    def _choose_max_tokens(self) -> int:
        """Return the default number of tokens per micro-batch, halved until all estimates fit."""
        max_tokens = DEFAULT_MAX_TOKENS_PER_MICRO_BATCH
        while max_tokens // 2 >= self.rank.longest_sequence:
            if self._is_comfortable(max_tokens):
                return max_tokens
            max_tokens //= 2
        return max_tokens

    def _is_comfortable(self, max_tokens: int) -> bool:
        """Return whether all memory that depends on the micro-batch is enough, with some left."""
        names = {"node"} if not self.rank.is_on_gpu else {"learner rank", "rank and worker"}
        return all(
            use.num_bytes <= _COMFORTABLE_SHARE * use.num_available_bytes
            for use in self.list_uses(max_tokens)
            if use.owner in names and use.num_available_bytes is not None
        )

    def _make_rank_remedy(self, max_tokens: int) -> str:
        """Return settings with which a step of a rank needs less memory."""
        learner, remedies = self.run.learner, []
        if not learner.activation_checkpointing:
            remedies.append("set learner.activation_checkpointing = true")
        if max_tokens > self.rank.longest_sequence:
            remedies.append(f"set learner.max_tokens_per_micro_batch = {max_tokens // 2}")
        if learner.dtype == "float32" and self.rank.is_on_gpu:
            remedies.append("set learner.dtype = 'bfloat16'")
        if self.rank.is_on_gpu:
            remedies.append(f"set learner.num_ranks = {2 * learner.num_ranks}")
        if self.rank.reference_bytes and self.rank.is_on_gpu and not learner.offload_reference:
            remedies.append("set learner.offload_reference = true")
        return " or ".join(remedies[:2]) or "lower rollout.max_tokens"


def _sum_owners(parts_by_owner: dict[str, list[MemoryPart]]) -> tuple[MemoryPart, ...]:
    """Return one part for each owner."""
    return tuple(
        MemoryPart(name=owner, num_bytes=sum(part.num_bytes for part in parts))
        for owner, parts in parts_by_owner.items()
    )


def _measure_critic(run: LanguageModelRun, shape: ModelShape) -> ModelShape | None:
    """Return the sizes of a critic that has its own model."""
    critic = run.algorithm.critic if isinstance(run.algorithm, PpoConfig) else None
    if not isinstance(critic, ModelCritic):
        return None
    return shape if critic.path is None else measure_path(critic.path)
