"""The engine that a run configuration asks for."""

from __future__ import annotations

import importlib.util

import torch

from ludus.proto.config import LanguageModelRun, TransformersGenerator, VllmGenerator
from ludus.trainer.core.interfaces import Engine
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model


def make_engine(run: LanguageModelRun, model_path: str, chat: ChatTokenizer) -> Engine:
    """An engine that holds the model of `model_path`; requests bring their own seeds."""
    # Each engine is imported where it is wanted: vLLM may not be installed.
    match run.generator:
        case TransformersGenerator():
            from ludus.trainer.rollout.transformers_engine import TransformersEngine

            model = load_language_model(model_path, getattr(torch, run.learner.dtype))
            if torch.cuda.is_available():
                model = model.to("cuda")
            return TransformersEngine(
                model,
                end_token_id=chat.end_token_id,
                max_batch_size=run.generator.max_batch_size,
            )
        case VllmGenerator():
            from ludus.trainer.rollout.vllm_engine import VllmEngine

            return VllmEngine(
                model_path,
                run.generator,
                end_token_id=chat.end_token_id,
                max_tokens=run.generator.max_model_tokens or run.rollout.max_tokens,
                dtype=run.learner.dtype,
            )


def has_vllm() -> bool:
    """Whether vLLM is installed here."""
    return importlib.util.find_spec("vllm") is not None
