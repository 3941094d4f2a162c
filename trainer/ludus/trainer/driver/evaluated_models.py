"""The models of an evaluation without a run: checks, and players of their episodes.

    folder or Hugging Face id --check_model--> run with the model's limits --open_model--> player
    model of an endpoint      --Endpoint.check----------------------------open_model--> player

Everything that a user may have written wrongly is checked before a model's weights are read.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ludus.proto.config import LanguageModelRun, PretrainedModel, VllmGenerator
from ludus.proto.errors import ConfigError, NotFoundError, UserError
from ludus.proto.runs import CHECKPOINTS_FOLDER, METRICS_FILE
from ludus.trainer.core.devices import MIN_WIDTH_FOR_THREADS
from ludus.trainer.core.model_paths import (
    FINE_TUNED_FOLDER,
    MODEL_CONFIG_FILE,
    find_gguf,
    is_fine_tuned_run,
    is_folder_path,
)
from ludus.trainer.core.output import warn_user
from ludus.trainer.models import load
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.weight_files import find_weight_problem
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer
from ludus.trainer.rollout.adapters.tool_adapter import Toolbox
from ludus.trainer.rollout.endpoint_policy import NO_TOKENIZER, Endpoint, EndpointRunner
from ludus.trainer.rollout.engines.async_engine import AsyncEngine, make_engine
from ludus.trainer.rollout.engines.vllm_process import is_vllm_installed
from ludus.trainer.rollout.group import GroupPlayer
from ludus.trainer.rollout.rewards.reward_models import RewardModels
from ludus.trainer.rollout.runner import RunnerComponents, episode_limits
from ludus.trainer.run.checkpoint import MODEL_FOLDER, find_checkpoint, list_checkpoints
from ludus.trainer.setup.environments import ConnectedEnvironment

_FIELD = "--model"
_FOLDER_HINT = "name a folder that save_pretrained wrote, or a Hugging Face id"


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model that has been checked."""

    name: str
    """Name as the user wrote it."""
    run: LanguageModelRun
    """Run with the model's path, and with limits that fit its context."""
    num_context_tokens: int | None = None
    """Number of tokens that the model can read; None if unknown."""
    width: int = 0


def check_generator(run: LanguageModelRun) -> None:
    """Check that the engine is installed.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if isinstance(run.generator, VllmGenerator) and not is_vllm_installed():
        raise ConfigError(
            "--generator vllm needs vLLM, which is not installed here; install it "
            "(pip install vllm), or omit --generator to use transformers"
        )


def check_model(run: LanguageModelRun, name: str, *, lowers: bool = False) -> EvaluatedModel:
    """Return a model with its limits, after checks that read only its small files.

    Args:
        lowers: whether completions become shorter if the model's context is short.

    Raises:
        UserError: there is no language model, or it cannot be used.
    """
    path = find_model_path(name)
    with name_model(name, path):
        config = load.load_config(path)
        load.load_skeleton(path)
    text_config = config.get_text_config()
    num_context_tokens = getattr(text_config, "max_position_embeddings", None)
    limits = run.rollout
    max_tokens = min(num_context_tokens or limits.max_tokens, limits.max_tokens)
    max_completion_tokens = limits.max_completion_tokens
    if lowers and max_completion_tokens > max_tokens // 2:
        max_completion_tokens = max(1, max_tokens // 2)
        warn_user(
            f"'{name}' reads at most {max_tokens} tokens, so its completions have at most "
            f"{max_completion_tokens}; set --max-completion-tokens to choose another number"
        )
    if max_completion_tokens >= max_tokens:
        raise ConfigError(
            f"{_FIELD} '{name}' reads at most {max_tokens} tokens, so --max-completion-tokens must "
            f"be less, got {max_completion_tokens}; the prompt needs room too"
        )
    run = run.model_copy(
        update={
            "model": _get_pretrained(run).model_copy(update={"path": path}),
            "rollout": limits.model_copy(
                update={"max_tokens": max_tokens, "max_completion_tokens": max_completion_tokens}
            ),
        }
    )
    with name_model(name, path):
        ChatTokenizer.load(path, run.model)
    width = int(getattr(text_config, "hidden_size", 0) or 0)
    return EvaluatedModel(name, run, num_context_tokens, width)


@asynccontextmanager
async def open_model(
    model: EvaluatedModel, environment: ConnectedEnvironment, endpoint: Endpoint | None
) -> AsyncIterator[GroupPlayer]:
    """Yield the player of a model's episodes; free the model after the block."""
    reward_models = RewardModels()
    name = next(iter(model.run.environments))
    async with AsyncExitStack() as stack:
        stack.callback(reward_models.close)
        if endpoint is not None:
            runner = _make_endpoint_runner(model, environment, endpoint, name)
            tasks = environment.description.tasks
            yield GroupPlayer.make(runner, model.run, name, tasks, reward_models)
            return
        path = _get_pretrained(model.run).path
        _set_threads(model)
        tokenizer = ChatTokenizer.load(path, model.run.model)
        with name_model(model.name, path):
            engine = AsyncEngine(make_engine(model.run, path, tokenizer))
        stack.callback(_free_memory)
        stack.callback(engine.close)
        components = RunnerComponents(model.run, name, environment.client, engine, tokenizer, stack)
        yield await GroupPlayer.start(components, reward_models)


@contextmanager
def name_model(name: str, path: str, field: str = _FIELD) -> Iterator[None]:
    """Replace the path in the errors of a model by the name that the user wrote.

    Raises:
        UserError: the model cannot be used.
    """
    try:
        yield
    except UserError as error:
        reason = str(error).removeprefix(f"model.path = '{path}': ")
        if path == name:
            reason = f"there is no such folder, and as a Hugging Face id: {reason}"
        raise type(error)(f"{field} '{name}': {reason}") from error


def find_model_path(name: str, field: str = _FIELD) -> str:
    """Return the path of a model's folder, or the Hugging Face id unchanged.

    The folder of a run stands for the model of its latest checkpoint. The folder of a fine-tuning
    run stands for the model that the run kept.

    Args:
        field: name of the model's option, for messages.

    Raises:
        UserError: there is no such model.
    """
    folder = Path(name).expanduser()
    gguf_file = find_gguf(folder)
    if gguf_file is not None:
        raise ConfigError(
            f"{field} '{name}' is a GGUF file, which cannot be loaded here; convert it with "
            f"`ludus model convert {gguf_file} FOLDER`, or serve the file with llama.cpp (`ludus "
            "eval --endpoint`)"
        )
    if not folder.is_dir():
        if is_folder_path(name) or folder.exists():
            problem = "is a file" if folder.exists() else "does not exist"
            raise NotFoundError(f"{field} '{name}' {problem}; {_FOLDER_HINT}")
        return name
    if is_fine_tuned_run(folder):
        folder = folder / FINE_TUNED_FOLDER
    elif (folder / METRICS_FILE).is_file() or (folder / CHECKPOINTS_FOLDER).is_dir():
        folder = _find_trained_model(folder, f"{field} '{name}'")
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise NotFoundError(
            f"{field} '{name}' is no model, because it has no {MODEL_CONFIG_FILE}; {_FOLDER_HINT}"
        )
    weight_problem = find_weight_problem(folder)
    if weight_problem is not None:
        raise NotFoundError(
            f"{field} '{name}': {weight_problem}; copy the whole folder that save_pretrained wrote"
        )
    return str(folder.resolve())


def _find_trained_model(run_folder: Path, source: str) -> Path:
    """Return the model of a run's latest checkpoint."""
    if not list_checkpoints(run_folder / CHECKPOINTS_FOLDER):
        raise NotFoundError(
            f"{source} is a run that has no checkpoint yet; wait, or resume the run"
        )
    folder = find_checkpoint(None, run_folder / CHECKPOINTS_FOLDER) / MODEL_FOLDER
    if not folder.is_dir():
        raise NotFoundError(f"{source} is a run that trains no language model; {_FOLDER_HINT}")
    return folder


def _get_pretrained(run: LanguageModelRun) -> PretrainedModel:
    assert isinstance(run.model, PretrainedModel)
    return run.model


def _set_threads(model: EvaluatedModel) -> None:
    is_small = model.width < MIN_WIDTH_FOR_THREADS
    torch.set_num_threads(1 if is_small else model.run.rollout.known_num_threads)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _make_endpoint_runner(
    model: EvaluatedModel, environment: ConnectedEnvironment, endpoint: Endpoint, name: str
) -> EndpointRunner:
    config = environment.config
    return EndpointRunner(
        environment=name,
        client=environment.client,
        generate=_refuse_tokens,
        chat=NO_TOKENIZER,
        renderer=make_renderer(config, name),
        limits=episode_limits(model.run, name),
        max_sessions=environment.description.max_sessions,
        replays_lost_episodes=config.resume,
        toolbox=Toolbox(environment.client, name) if config.tools else None,
        endpoint=endpoint,
        model=model.name,
    )


async def _refuse_tokens(*_: Any) -> Any:
    raise NotImplementedError("an endpoint samples texts, not tokens")
