"""Helpers for engine tests: an engine and a plain model with the same weights."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ludus.proto.config import TinyModel, VllmGenerator
from ludus.trainer.core.interfaces import Engine, EngineOutput, EngineRequest
from ludus.trainer.core.types import Sampling, ScoringRequest
from ludus.trainer.models.load import load_language_model
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from ludus.trainer.rollout.engines.vllm_process import is_vllm_installed, make_vllm_variables

MAX_TOKENS = 128
END_TOKEN_ID = 1
TOLERANCE = 1e-4
"""Absolute tolerance of log-probs in float32."""
CANARY_PROMPT = ScoringRequest([5, 9, 11, 40], [7, 30, 12])


@dataclass(frozen=True)
class EngineKind:
    """The type of an engine, and whether its model ties the embeddings."""

    name: str
    tie_embeddings: bool

    def __str__(self) -> str:
        return f"{self.name}-{'tied' if self.tie_embeddings else 'untied'}"


TRANSFORMERS = [EngineKind("transformers", is_tied) for is_tied in (False, True)]
VLLM = [
    pytest.param(EngineKind("vllm", is_tied), marks=[pytest.mark.slow, pytest.mark.timeout(900)])
    for is_tied in (False, True)
]


@dataclass(frozen=True)
class EnginePair:
    """An engine, and a plain model with the same weights."""

    kind: EngineKind
    engine: Engine
    model: PreTrainedModel

    def sync(self, seed: int) -> None:
        """Change the plain model slightly and load its weights into the engine."""
        add_noise(self.model, seed, 0.05)
        self.engine.load_weights(dict(self.model.named_parameters()))


class UnclosableEngine:
    """An engine whose `close` has no effect, because the fixture closes the wrapped engine."""

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def open_pair(kind: EngineKind, folder: Path) -> Iterator[EnginePair]:
    """Open an engine of this kind with its plain model; skip the test if vLLM is missing.

    Requests of an engine with an untied model may be restricted to answers.
    """
    path = make_folder(folder, tie_embeddings=kind.tie_embeddings)
    model = load_language_model(path).eval()
    if kind.name == "transformers":
        yield EnginePair(kind, make_transformers_engine(path), model)
        return
    with prepare_for_vllm():
        engine = make_vllm_engine(path, restricts_to_answers=not kind.tie_embeddings)
        with closing(engine):
            yield EnginePair(kind, engine, model)


def make_folder(folder: Path, *, tie_embeddings: bool) -> str:
    """Write a tiny model whose distribution is far from uniform; return its folder."""
    config = TinyModel(
        width=64,
        num_heads=2,
        intermediate=64,
        initializer_range=0.02,
        embedding_range=0.02,
        warm_start_layers="all",
        tie_embeddings=tie_embeddings,
    )
    tokenizer = make_tokenizer(["hard 16 vs 10 HIT STAND"], config.vocab_size)
    assert tokenizer.eos_token_id == END_TOKEN_ID
    model = make_model(config, tokenizer, seed=0)
    add_noise(model, seed=0, scale=0.1)
    save(model, tokenizer, folder)
    return str(folder)


def make_transformers_engine(path: str, **limits: int) -> TransformersEngine:
    """Return a transformers engine with the model in `path`."""
    model = load_language_model(path)
    return TransformersEngine(model, end_token_ids=[END_TOKEN_ID], **limits)


def make_vllm_engine(path: str, *, restricts_to_answers: bool = False) -> Engine:
    """Return a vLLM engine with the model in `path`; call this inside `prepare_for_vllm`."""
    from ludus.trainer.rollout.engines.vllm_engine import VllmEngine

    return VllmEngine(
        path,
        VllmGenerator(max_num_seqs=64),
        end_token_ids=[END_TOKEN_ID],
        max_tokens=MAX_TOKENS,
        dtype="float32",
        restricts_to_answers=restricts_to_answers,
    )


@contextmanager
def prepare_for_vllm() -> Iterator[None]:
    """Prepare this process for one vLLM engine at a time; skip the test if vLLM is missing."""
    if not is_vllm_installed():
        pytest.skip("vLLM is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in make_vllm_variables(num_threads=1).items():
            patch.setenv(name, value)
        yield


@torch.no_grad()
def add_noise(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Add Gaussian noise to every parameter in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def make_requests(
    num_requests: int,
    *,
    temperature: float = 1.0,
    max_tokens: int = 12,
    top_p: float = 1.0,
    first_seed: int = 0,
) -> list[EngineRequest]:
    """Return requests with random prompts of four lengths."""
    rng = random.Random(0)
    return [
        EngineRequest(
            request_id,
            [rng.randrange(3, 250) for _ in range(rng.choice([3, 8, 21, 40]))],
            Sampling(temperature, max_tokens, top_p),
            seed=first_seed + request_id,
        )
        for request_id in range(num_requests)
    ]


def complete(engine: Engine, requests: Iterable[EngineRequest]) -> dict[int, EngineOutput]:
    """Submit the requests and return their outputs by request id."""
    for request in requests:
        engine.submit(request)
    return drain(engine)


def drain(engine: Engine) -> dict[int, EngineOutput]:
    """Step the engine until it has no work; return the outputs by request id."""
    outputs: dict[int, EngineOutput] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    return outputs


@torch.no_grad()
def compute_logprobs(
    model: PreTrainedModel, prompt_ids: list[int], output_ids: list[int], temperature: float = 1.0
) -> list[float]:
    """Return the log-probs of a completion from one forward pass without a cache."""
    logits = model(torch.tensor([prompt_ids + output_ids]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt_ids) - 1 : -1] / temperature, dim=-1)
    return logprobs[range(len(output_ids)), output_ids].tolist()


def compute_max_error(
    model: PreTrainedModel, requests: Iterable[EngineRequest], outputs: dict[int, EngineOutput]
) -> float:
    """Return the largest log-prob error of the outputs, compared with a full forward pass."""
    errors = [0.0]
    for request in requests:
        output = outputs[request.request_id]
        # For greedy completions, engines report log-probs at temperature 1.
        temperature = request.sampling.temperature or 1.0
        expected_logprobs = compute_logprobs(
            model, request.prompt_ids, output.token_ids, temperature
        )
        errors += [abs(a - b) for a, b in zip(output.logprobs, expected_logprobs, strict=True)]
    return max(errors)
