"""The refusal of runs that certainly run out of memory, before they start.

Only needs that no run avoids are compared with the memory: weights, gradients and optimizer state,
the reduction of gradients, a whole copy in each publication, and what vLLM requires to start.
Activations and caches depend on the lengths of episodes, so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ludus.proto.config import LanguageModelRun, TransformersGenerator
from ludus.proto.errors import ConfigError
from ludus.proto.memory_plan import MemoryPlan
from ludus.trainer.setup.memory.learner import RankMemory
from ludus.trainer.setup.memory.machine import GIB, MIB, Machine
from ludus.trainer.setup.memory.plan import RunMemory

_MAX_RANKS = 1024


def check_memory(run: LanguageModelRun, machine: Machine) -> MemoryPlan:
    """Return the memory plan of a run.

    Raises:
        ConfigError: the run would certainly run out of memory.
        NotFoundError: there is no model.
    """
    memory = RunMemory.measure(run, machine)
    problem = find_problem(memory)
    if problem is not None:
        raise ConfigError(problem)
    return memory.make_plan()


def find_problem(memory: RunMemory) -> str | None:
    """Return the reason why a run certainly runs out of memory, and the remedy; None if it fits."""
    return next(_list_problems(memory), None)


def _list_problems(memory: RunMemory) -> Iterator[str]:
    yield from _list_cache_problems(memory)
    if memory.machine.gpu_bytes is not None:
        yield from _list_gpu_problems(memory, memory.machine.gpu_bytes)
    if memory.machine.node_bytes is not None:
        yield from _list_node_problems(memory, memory.machine.node_bytes)


def _list_cache_problems(memory: RunMemory) -> Iterator[str]:
    """Yield a message if vLLM's KV cache is too small for the longest sequence."""
    worker = memory.worker
    cache_bytes, needed_bytes = worker.fixed_cache_bytes, worker.min_cache_bytes
    if cache_bytes is not None and needed_bytes > cache_bytes:
        field = "generator.kv_cache_gib"
        yield (
            f"{field} = {cache_bytes // GIB}, but vLLM needs {_format(needed_bytes)} for one "
            f"sequence of {worker.max_sequence_tokens} tokens; set {field} = "
            f"{-(-needed_bytes // GIB)}, or lower {_name_token_limit(memory.run)}"
        )


def _list_gpu_problems(memory: RunMemory, gpu_bytes: int) -> Iterator[str]:
    """Yield a message for each kind of GPU memory that is too small."""
    rank = memory.rank
    rank_bytes = rank.min_step_bytes if rank.is_on_gpu else 0
    worker_bytes, worker_remedy = _measure_min_worker(memory, gpu_bytes)
    if rank_bytes > gpu_bytes:
        yield (
            f"each learner rank needs at least {_format(rank_bytes)} of a GPU for weights, "
            f"gradients and optimizer state, but a GPU has {_format(gpu_bytes)}; "
            f"{_find_rank_remedy(rank, gpu_bytes)}"
        )
    if worker_bytes > gpu_bytes:
        yield (
            f"each rollout worker needs at least {_format(worker_bytes)} of a GPU, but a GPU has "
            f"{_format(gpu_bytes)}; {worker_remedy}"
        )
    yield from _list_share_problems(memory, gpu_bytes)
    if memory.shares_gpu and rank_bytes + worker_bytes > gpu_bytes:
        yield (
            f"a learner rank and a rollout worker share a GPU of {_format(gpu_bytes)}, but they "
            f"need at least {_format(rank_bytes)} and {_format(worker_bytes)}; "
            f"{_find_shared_remedy(memory, gpu_bytes - rank_bytes)}"
        )


def _list_share_problems(memory: RunMemory, gpu_bytes: int) -> Iterator[str]:
    """Yield a message if vLLM's share of a GPU is too small for its weights and a sequence."""
    worker, generator = memory.worker, memory.run.generator
    if not worker.is_on_gpu or isinstance(generator, TransformersGenerator):
        return
    share_bytes = int(generator.gpu_memory_utilization * gpu_bytes)
    needed_bytes = worker.weight_bytes + worker.min_cache_bytes
    if worker.fixed_cache_bytes is None and needed_bytes > share_bytes:
        remedy = f"raise generator.tensor_parallel_size, now {generator.tensor_parallel_size}"
        if needed_bytes < gpu_bytes:
            field = "generator.gpu_memory_utilization"
            remedy = f"raise {field} above {needed_bytes / gpu_bytes:.2f}"
        yield (
            f"generator.gpu_memory_utilization = {generator.gpu_memory_utilization:g} gives vLLM "
            f"{_format(share_bytes)} of a GPU, but the weights and the KV cache of a sequence of "
            f"{worker.max_sequence_tokens} tokens need {_format(needed_bytes)}; {remedy}"
        )


def _measure_min_worker(memory: RunMemory, gpu_bytes: int) -> tuple[int, str]:
    """Return the memory that a worker certainly needs on a GPU, and how it needs less."""
    worker, generator = memory.worker, memory.run.generator
    if not worker.is_on_gpu:
        return 0, ""
    if isinstance(generator, TransformersGenerator):
        return worker.weight_bytes, (
            "set generator.kind = 'vllm' with generator.tensor_parallel_size, or choose a smaller "
            "model"
        )
    if worker.fixed_cache_bytes is None:
        return int(generator.gpu_memory_utilization * gpu_bytes), ""
    return worker.weight_bytes + worker.fixed_cache_bytes, (
        f"lower generator.kv_cache_gib = {generator.kv_cache_gib}, or raise "
        "generator.tensor_parallel_size"
    )


def _list_node_problems(memory: RunMemory, node_bytes: int) -> Iterator[str]:
    """Yield a message if the node of rank 0 has too little main memory."""
    run, rank, worker = memory.run, memory.rank, memory.worker
    is_whole_run = memory.machine.is_whole_run
    must_share_node = is_whole_run or run.placement.learner_ranks == "strict_pack"
    num_ranks = run.learner.num_ranks if must_share_node else 1
    step_bytes = published_bytes = 0
    if not rank.is_on_gpu:
        step_bytes, published_bytes = rank.min_step_bytes, rank.min_state_bytes
    learner_bytes = max(num_ranks * step_bytes, num_ranks * published_bytes + rank.staging_bytes)
    num_workers = run.rollout.min_workers if is_whole_run else 0
    worker_bytes = 0 if worker.is_on_gpu else num_workers * worker.weight_bytes
    if learner_bytes + worker_bytes <= node_bytes:
        return
    owner = "this machine" if is_whole_run else "a node"
    worker_text = f" and the rollout workers {_format(worker_bytes)}" if worker_bytes else ""
    remedy = "train adapters with model.lora, or use a machine with more memory"
    if rank.shape.num_adapter_parameters:
        remedy = "choose a smaller model, or use a machine with more memory"
    yield (
        f"the learner needs at least {_format(learner_bytes)}{worker_text} of main memory, but "
        f"{owner} has {_format(node_bytes)}; {remedy}; if there is more memory, set "
        "placement.node_memory_gib"
    )


def _find_rank_remedy(rank: RankMemory, gpu_bytes: int) -> str:
    """Return the settings with which a rank's state fits in a GPU."""
    run = rank.run
    if rank.reference_bytes and not run.learner.offload_reference:
        learner = run.learner.model_copy(update={"offload_reference": True})
        offloading = replace(rank, run=run.model_copy(update={"learner": learner}))
        if offloading.min_step_bytes <= gpu_bytes:
            return "set learner.offload_reference = true"
    num_ranks = run.learner.num_ranks
    while num_ranks < _MAX_RANKS:
        num_ranks += 1
        update = {"num_ranks": num_ranks, "num_gpus_per_rank": 1.0}
        learner = run.learner.model_copy(update=update)
        more_ranks = replace(rank, run=run.model_copy(update={"learner": learner}))
        if more_ranks.min_step_bytes <= gpu_bytes:
            return f"set learner.num_ranks to at least {num_ranks}"
    return "use larger GPUs, or choose a smaller model"


def _find_shared_remedy(memory: RunMemory, free_bytes: int) -> str:
    """Return the settings with which a worker fits in what a rank leaves of a GPU."""
    worker, gpu_bytes = memory.worker, memory.machine.gpu_bytes
    assert gpu_bytes is not None
    needed_bytes = worker.weight_bytes + worker.min_cache_bytes
    if isinstance(memory.run.generator, TransformersGenerator) or needed_bytes > free_bytes:
        return (
            "set learner.num_gpus_per_rank = 1 and rollout.num_gpus_per_worker = 1 on a machine "
            "with more GPUs, or train adapters with model.lora"
        )
    if worker.fixed_cache_bytes is None:
        share = int(100 * free_bytes / gpu_bytes) / 100
        return f"set generator.gpu_memory_utilization = {share:g} or less"
    return f"lower generator.kv_cache_gib below {(free_bytes - worker.weight_bytes) / GIB:.0f}"


def _name_token_limit(run: LanguageModelRun) -> str:
    is_set = getattr(run.generator, "max_model_tokens", None) is not None
    return "generator.max_model_tokens" if is_set else "rollout.max_tokens"


def _format(num_bytes: int) -> str:
    if num_bytes < GIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"
