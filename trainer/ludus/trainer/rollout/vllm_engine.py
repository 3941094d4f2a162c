"""Samples with vLLM, in this process, on a CPU or on GPUs.

Requests take the public `LLMEngine`: driving its core directly measured 15 % faster with a tiny
model, and would tie this file to internals that every release changes.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from vllm import RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from ludus.proto.config import VllmGenerator
from ludus.proto.errors import ConfigError, WeightSyncError
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.rollout.vllm_environment import IN_PROCESS

_GIB = 2**30
_CANARY_ID = "canary"

# Both speak at times when nothing is wrong, or of nothing but a batch's whole content.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)


class VllmEngine:
    """One vLLM engine in this process.

    A request's random numbers follow from its seed alone, so what it samples does not depend
    on the requests it shares a batch with.
    """

    def __init__(
        self,
        model_path: str,
        config: VllmGenerator,
        *,
        end_token_id: int,
        max_tokens: int,
        dtype: str,
    ) -> None:
        if os.environ.get(IN_PROCESS) != "0":
            raise ConfigError(
                f"expected {IN_PROCESS}=0 in the environment of a vLLM engine, got "
                f"{os.environ.get(IN_PROCESS)!r}; start the process with vllm_environment()"
            )
        with _contained():
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
                    **_device_args(config),
                )
            )
        self._end_token_id = end_token_id
        self._names, self._tied_names = _parameter_names(self._llm.model_config.hf_config)
        self._thread: int | None = None
        self._finished: list[EngineOutput] = []
        """Requests that ended while a canary prompt was scored."""

    @property
    def has_work(self) -> bool:
        """True while a submitted request has no output yet."""
        return bool(self._finished) or self._llm.has_unfinished_requests()

    def submit(self, request: EngineRequest) -> None:
        """Add the request to the batch of the next step."""
        params = SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            repetition_penalty=request.sampling.repetition_penalty,
            max_tokens=request.sampling.max_tokens,
            seed=request.seed,
            stop_token_ids=[self._end_token_id],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self._llm.add_request(str(request.request_id), tokens_input(request.prompt_ids), params)

    def abort(self, request_ids: Collection[int]) -> None:
        """Take the requests out of the batch, and free their part of the cache."""
        self._llm.abort_request([str(request_id) for request_id in request_ids])
        self._finished = [one for one in self._finished if one.request_id not in request_ids]

    def step(self) -> list[EngineOutput]:
        """What finished in one step of the batch."""
        if self._finished:
            finished, self._finished = self._finished, []
            return finished
        return [self._output(output) for output in self._step()]

    def load_weights(self, state: StateDict) -> None:
        """Load weights; running requests continue as if these had read their tokens.

        Raises:
            WeightSyncError: a tensor is missing or unknown, or a layer kept its old weights.
        """
        if state.keys() != self._names:
            raise WeightSyncError(
                f"expected the {len(self._names)} parameters of the model, got {len(state)}; they "
                f"differ in {sorted(state.keys() ^ self._names)[:5]}"
            )
        # A layer is only renewed by a tensor under its own name, also where it shares one.
        shared = [(name, state[source]) for name, source in self._tied_names.items()]
        stale = self._llm.collective_rpc(_reload, args=([*state.items(), *shared],))
        self._refuse_stale_layers([name for names in stale for name in names])
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def score(self, canary: ScoringRequest) -> list[float]:
        """Log-probs of the canary prompt's completion at temperature 1.

        The canary prompt runs as one more request, before all that wait; what else finishes
        meanwhile is kept for the next `step`.
        """
        token_ids = canary.prompt_ids + canary.completion_ids
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._llm.add_request(_CANARY_ID, tokens_input(token_ids), params, priority=-1)
        answer: RequestOutput | None = None
        while answer is None:
            for output in self._step():
                if output.request_id == _CANARY_ID:
                    answer = output
                else:
                    self._finished.append(self._output(output))
        start = len(canary.prompt_ids)
        return _chosen_logprobs(token_ids[start:], answer.prompt_logprobs[start:])

    def close(self) -> None:
        """Free the model, the cache and any worker processes."""
        self._llm.engine_core.shutdown()

    def _step(self) -> list[RequestOutput]:
        if self._thread != threading.get_ident():
            # Each thread has its own OpenMP setting, and torch adopts its own number of threads
            # in the middle of the first step: vLLM's kernels refuse to run with two numbers.
            torch.set_num_threads(torch.get_num_threads())
            self._thread = threading.get_ident()
        return self._llm.step()

    def _refuse_stale_layers(self, names: Sequence[str]) -> None:
        if names:
            raise WeightSyncError(
                f"layers {sorted(names)[:5]} still compute with a packed copy of their old "
                "weights; this model needs generator.kind = 'transformers'"
            )

    def _output(self, output: RequestOutput) -> EngineOutput:
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {output.request_id}: {answer.finish_reason}")
        token_ids = list(answer.token_ids)
        logprobs = _chosen_logprobs(token_ids, answer.logprobs)
        stopped = token_ids[-1] == self._end_token_id
        return EngineOutput(int(output.request_id), token_ids, logprobs, stopped)


def _device_args(config: VllmGenerator) -> dict[str, Any]:
    """The engine arguments that differ between GPUs and CPUs."""
    if torch.cuda.is_available():
        return {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "tensor_parallel_size": config.tensor_parallel_size,
            "enforce_eager": config.enforce_eager,
            "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        }
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"generator.tensor_parallel_size expected 1 on a machine without GPUs, got "
            f"{config.tensor_parallel_size}; remove it"
        )
    return {
        "kv_cache_memory_bytes": config.kv_cache_gib * _GIB,
        # The smallest block that the CPU kernels know: shared prefixes are short.
        "block_size": 32,
        "enforce_eager": True,
        # With it, requests that have a seed of their own crash on a CPU.
        "enable_chunked_prefill": False,
        "distributed_executor_backend": "uni",
    }


def _parameter_names(config: PreTrainedConfig) -> tuple[frozenset[str], dict[str, str]]:
    """The parameters as a learner names them, and for each name left out the one it is tied to."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = frozenset(name_of.values())
    everything = model.named_parameters(remove_duplicate=False)
    tied = {name: name_of[id(parameter)] for name, parameter in everything if name not in names}
    return names, tied


def _reload(worker: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """The layers that were not renewed; runs in each worker of the engine.

    On a CPU a layer computes with a packed copy of its weights, `cpu_linear`, that is made
    again when the layer is loaded. One that was not reloaded keeps it, and nothing says so.
    """
    model = worker.get_model()
    before = _packed_weights(model)
    worker.reload_weights(weights_iterator=iter(weights))
    return [name for name, packed in _packed_weights(model).items() if packed is before[name]]


def _packed_weights(model: torch.nn.Module) -> dict[str, object]:
    layers = model.named_modules()
    return {name: layer.cpu_linear for name, layer in layers if hasattr(layer, "cpu_linear")}


def _chosen_logprobs(token_ids: Sequence[int], columns: Sequence[Any]) -> list[float]:
    return [column[token].logprob for token, column in zip(token_ids, columns, strict=True)]


@contextmanager
def _contained() -> Iterator[None]:
    """Undoes what the start of vLLM on a CPU does to the rest of the process.

    It fills LD_PRELOAD, which every child process would inherit, and makes
    torch.set_num_threads do nothing.
    """
    preload, set_num_threads = os.environ.get("LD_PRELOAD"), torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload
