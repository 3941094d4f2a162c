"""An engine that samples with vLLM in this process, on a CPU or on GPUs.

Requests use the public class `LLMEngine`. Using its core directly was 15 % faster with a tiny
model, but the core is internal and changes with every release.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)

from ludus.proto.config import VllmGenerator
from ludus.proto.errors import ConfigError, WeightSyncError
from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.devices import choose_device
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.rollout.engines.restriction import restrict_logits
from ludus.trainer.rollout.engines.vllm_process import (
    MULTIPROCESSING_VARIABLE,
    check_vllm_build,
)

_ANSWERS = "answers"
"""Name of the additional argument of a request that is restricted to answers."""
_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_GIB = 2**30
_MIN_MEMORY_SHARE = 0.01
_SCORING_REQUEST_ID = "score"

# These loggers report harmless conditions, or log the whole content of a batch.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)


class AnswerLogitsProcessor(LogitsProcessor):
    """The restriction of requests to answers, which vLLM applies before it samples.

    vLLM then computes the log-probs of the restricted distribution. Its own `allowed_token_ids`
    are the same at all positions, and its structured outputs accept every split of an answer into
    tokens, of which the learner would have to know the allowed tokens too.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, tuple[AnswerTrie, list[int]]] = {}
        """Answers and sampled tokens of the restricted requests, by row. vLLM extends the lists."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, _find_answers)

    def apply(self, logits: Tensor) -> Tensor:
        return restrict_logits(logits, self._requests)


def _find_answers(
    params: SamplingParams, _: list[int] | None, token_ids: list[int]
) -> tuple[AnswerTrie, list[int]] | None:
    """Return the answers and the sampled tokens of a request; None if it is not restricted."""
    answers = (params.extra_args or {}).get(_ANSWERS)
    return None if answers is None else (answers, token_ids)


class VllmEngine:
    """One vLLM engine in this process.

    A request's random numbers depend only on its seed, so its tokens do not depend on the other
    requests in its batch.
    """

    def __init__(
        self,
        model_path: str,
        config: VllmGenerator,
        *,
        end_token_ids: Collection[int],
        max_tokens: int,
        dtype: str,
        device: torch.device | None = None,
        restricts_to_answers: bool = False,
    ) -> None:
        """Start the engine.

        Args:
            device: device of the model. None selects a GPU if there is one.
            restricts_to_answers: whether requests may be restricted to answers.

        Raises:
            ConfigError: vLLM cannot use the device.
        """
        device = choose_device(device)
        check_vllm_build(has_gpu=device.type == "cuda")
        if os.environ.get(MULTIPROCESSING_VARIABLE) != "0":
            raise ConfigError(
                f"{MULTIPROCESSING_VARIABLE} = {os.environ.get(MULTIPROCESSING_VARIABLE)!r} must "
                "be '0' in a process that runs a vLLM engine; start the process with the variables "
                "from make_vllm_variables()"
            )
        self._processors = [AnswerLogitsProcessor] if restricts_to_answers else None
        if restricts_to_answers:
            # The second runner, the default on GPUs, gives processors no sampled tokens on the CPU.
            os.environ[_RUNNER_VARIABLE] = "0"
        with _restore_process_settings():
            self._llm = LLMEngine.from_engine_args(
                EngineArgs(
                    model=model_path,
                    skip_tokenizer_init=True,
                    dtype=dtype,
                    max_model_len=max_tokens,
                    max_num_seqs=config.max_num_seqs,
                    logprobs_mode="processed_logprobs",
                    enable_prefix_caching=True,
                    scheduling_policy="priority",
                    generation_config="vllm",
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    async_scheduling=False,
                    logits_processors=self._processors,
                    **_make_device_arguments(config, device),
                )
            )
        self._end_token_ids = frozenset(end_token_ids)
        model_config = self._llm.model_config.hf_config
        self._parameter_names, self._tied_names = _list_parameter_names(model_config)
        self._step_thread_id: int | None = None
        self._finished_outputs: list[EngineOutput] = []
        """Outputs of requests that finished while a completion was being scored."""

    @property
    def has_work(self) -> bool:
        return bool(self._finished_outputs) or self._llm.has_unfinished_requests()

    def submit(self, request: EngineRequest) -> None:
        sampling_params = SamplingParams(
            **asdict(request.sampling),  # vLLM uses the same names
            seed=request.seed,
            extra_args=None if request.answers is None else {_ANSWERS: request.answers},
            stop_token_ids=sorted(self._end_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = tokens_input(request.prompt_ids)
        self._llm.add_request(str(request.request_id), prompt, sampling_params)

    def abort(self, request_ids: Collection[int]) -> None:
        self._llm.abort_request([str(request_id) for request_id in request_ids])
        self._finished_outputs = [
            output for output in self._finished_outputs if output.request_id not in request_ids
        ]

    def step(self) -> list[EngineOutput]:
        if self._finished_outputs:
            outputs, self._finished_outputs = self._finished_outputs, []
            return outputs
        return [self._make_output(output) for output in self._step()]

    def load_weights(self, state: StateDict) -> None:
        """Replace the weights. Running requests continue; their KV cache is computed again.

        Raises:
            WeightSyncError: a tensor is missing or unknown, or a layer still uses its old weights.
        """
        if state.keys() != self._parameter_names:
            raise WeightSyncError(
                f"expected the {len(self._parameter_names)} parameters of the model, got "
                f"{len(state)}; the names that differ include "
                f"{sorted(state.keys() ^ self._parameter_names)[:5]}"
            )
        # vLLM reloads a layer only from a tensor with the layer's own name, even a tied layer.
        tied_weights = [(name, state[source]) for name, source in self._tied_names.items()]
        weights = [*state.items(), *tied_weights]
        layers_by_worker = self._llm.collective_rpc(_reload_weights, args=(weights,))
        if stale_layers := sorted(layer for layers in layers_by_worker for layer in layers):
            raise WeightSyncError(
                f"layers {stale_layers[:5]} still compute with a packed copy of their old weights; "
                "this model needs generator.kind = 'transformers'"
            )
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def score(self, request: ScoringRequest) -> list[float]:
        """Return the log-probs of the request's completion at temperature 1.

        The completion is scored by an additional request with a higher priority. Outputs of other
        requests that finish meanwhile are stored for the next call of `step`.
        """
        token_ids = request.prompt_ids + request.completion_ids
        sampling_params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._llm.add_request(
            _SCORING_REQUEST_ID, tokens_input(token_ids), sampling_params, priority=-1
        )
        scored_output: RequestOutput | None = None
        while scored_output is None:
            for output in self._step():
                if output.request_id == _SCORING_REQUEST_ID:
                    scored_output = output
                else:
                    self._finished_outputs.append(self._make_output(output))
        start = len(request.prompt_ids)
        return _select_logprobs(token_ids[start:], scored_output.prompt_logprobs[start:])

    def close(self) -> None:
        """Free the model, the cache and any worker processes."""
        self._llm.engine_core.shutdown()

    def _step(self) -> list[RequestOutput]:
        if self._step_thread_id != threading.get_ident():
            # vLLM's kernels refuse to run if OpenMP and torch use different numbers of threads.
            # OpenMP has one setting per thread, so the thread that calls `step` sets it.
            torch.set_num_threads(torch.get_num_threads())
            self._step_thread_id = threading.get_ident()
        return self._llm.step()

    def _make_output(self, output: RequestOutput) -> EngineOutput:
        completion = output.outputs[0]
        finish_reason = completion.finish_reason
        if finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM stopped request {output.request_id}: {finish_reason}")
        token_ids = list(completion.token_ids)
        logprobs = _select_logprobs(token_ids, completion.logprobs)
        has_end_token = token_ids[-1] in self._end_token_ids
        return EngineOutput(int(output.request_id), token_ids, logprobs, has_end_token)


def _make_device_arguments(config: VllmGenerator, device: torch.device) -> dict[str, Any]:
    """Return the engine arguments that differ between GPUs and CPUs."""
    if device.type == "cuda":
        return {
            **_make_memory_arguments(config, device),
            "tensor_parallel_size": config.tensor_parallel_size,
            "enforce_eager": config.enforce_eager,
            "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        }
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"generator.tensor_parallel_size = {config.tensor_parallel_size} must be 1 on a "
            "CPU; remove it"
        )
    return {
        "kv_cache_memory_bytes": (config.kv_cache_gib or 1) * _GIB,
        # The smallest block that the CPU kernels support, because shared prefixes are short.
        "block_size": 32,
        "enforce_eager": True,
        # Chunked prefill crashes on a CPU if requests have seeds.
        "enable_chunked_prefill": False,
        "distributed_executor_backend": "uni",
    }


def _make_memory_arguments(config: VllmGenerator, device: torch.device) -> dict[str, Any]:
    """Return the arguments that limit vLLM's memory on a GPU.

    With a fixed KV cache, vLLM does not compare the free memory before and after a test pass. That
    comparison fails if another process on the GPU frees memory meanwhile.

    Raises:
        ConfigError: less than gpu_memory_utilization is free.
    """
    if config.kv_cache_gib is not None:
        # vLLM still requires this share of free memory, but uses the share for nothing else.
        return {
            "kv_cache_memory_bytes": config.kv_cache_gib * _GIB,
            "gpu_memory_utilization": _MIN_MEMORY_SHARE,
        }
    share = config.gpu_memory_utilization
    if config.tensor_parallel_size == 1:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        if free_bytes < share * total_bytes:
            free_share = math.floor(100 * free_bytes / total_bytes) / 100
            raise ConfigError(
                f"generator.gpu_memory_utilization = {share:g} needs "
                f"{share * total_bytes / _GIB:.1f} GiB of the GPU, but other processes leave "
                f"{free_bytes / _GIB:.1f} of {total_bytes / _GIB:.1f} GiB; set it to at most "
                f"{free_share:g}, or set generator.kv_cache_gib"
            )
    return {"gpu_memory_utilization": share}


def _list_parameter_names(config: PreTrainedConfig) -> tuple[frozenset[str], dict[str, str]]:
    """Return the learner's parameter names, and the source name of each tied parameter."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    name_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    names = frozenset(name_by_id.values())
    parameters = model.named_parameters(remove_duplicate=False)
    tied_names = {
        name: name_by_id[id(parameter)] for name, parameter in parameters if name not in names
    }
    return names, tied_names


def _reload_weights(worker: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Load the weights in a worker of the engine, and return the layers that were not reloaded.

    On a CPU, a layer computes with a packed copy of its weights, `cpu_linear`, which is created
    when the layer is loaded. A layer that is not reloaded silently keeps its old copy.
    """
    model = worker.get_model()
    old_weights = _find_packed_weights(model)
    worker.reload_weights(weights_iterator=iter(weights))
    return [
        name for name, weight in _find_packed_weights(model).items() if weight is old_weights[name]
    ]


def _find_packed_weights(model: torch.nn.Module) -> dict[str, object]:
    layers = model.named_modules()
    return {name: layer.cpu_linear for name, layer in layers if hasattr(layer, "cpu_linear")}


def _select_logprobs(token_ids: Sequence[int], position_logprobs: Sequence[Any]) -> list[float]:
    return [
        logprob_by_token[token_id].logprob
        for token_id, logprob_by_token in zip(token_ids, position_logprobs, strict=True)
    ]


@contextmanager
def _restore_process_settings() -> Iterator[None]:
    """Undo the side effects of starting vLLM on a CPU.

    vLLM sets LD_PRELOAD, which every child process would inherit, and disables
    torch.set_num_threads.
    """
    ld_preload, set_num_threads = os.environ.get("LD_PRELOAD"), torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        os.environ.pop("LD_PRELOAD", None)
        if ld_preload is not None:
            os.environ["LD_PRELOAD"] = ld_preload
