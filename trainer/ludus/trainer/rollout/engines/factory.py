"""Construction of the engine that a run configuration selects."""

from __future__ import annotations

import importlib.util

import torch

from ludus.proto.config import LanguageModelRun, TransformersGenerator, VllmGenerator
from ludus.trainer.core.interfaces import Engine
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model


def make_engine(run: LanguageModelRun, model_path: str, chat: ChatTokenizer) -> Engine:
    """Return an engine with the model in `model_path`."""
    # vLLM may not be installed, so each engine is imported only if it is used.
    match run.generator:
        case TransformersGenerator():
            from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine

            model = load_language_model(model_path, getattr(torch, run.learner.dtype))
            if torch.cuda.is_available():
                model = model.to("cuda")
            return TransformersEngine(
                model,
                end_token_id=chat.end_token_id,
                max_batch_size=run.generator.max_batch_size,
            )
        case VllmGenerator():
            from ludus.trainer.rollout.engines.vllm_engine import VllmEngine

            return VllmEngine(
                model_path,
                run.generator,
                end_token_id=chat.end_token_id,
                max_tokens=run.generator.max_model_tokens or run.rollout.max_tokens,
                dtype=run.learner.dtype,
            )


def has_vllm() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None
