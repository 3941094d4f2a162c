"""`train_agent` for language models in token-level environments, as a run of Ludus.

    AgentRequest --TokenTask--> LanguageModelRun --Trainer--> returns of the episodes
    both models  --a folder---> initial weights        |
         ^---------- latest weights -------------------+

Each completion is sampled as a whole, with a KV cache, and then stepped into the environment token
by token. PPO computes a generalized advantage for each token. The environment's `kl_coef` is the
coefficient of the KL penalty against the starting policy, applied to the reward of each token.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ludus.proto.errors import ConfigError
from ludus.proto.runs import Transcript
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from ludus.trainer.compat.gymformer.trainer.language_run import CRITIC_FOLDER, make_run
from ludus.trainer.compat.gymformer.trainer.request import (
    AgentRequest,
    EpisodeReturns,
    running_average,
)
from ludus.trainer.compat.gymformer.trainer.token_task import TokenTask
from ludus.trainer.core.output import replace_folder
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.run.checkpoint import model_folder

_T = TypeVar("_T")

# Used only to render canary prompts; episodes are already tokens.
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def train_language_model(request: AgentRequest) -> EpisodeReturns:
    """Train the actor and critic of a request in place and return the returns of the episodes.

    Raises:
        UserError: the environment or the networks are not compatible.
    """
    actor, critic = request.actor, request.critic
    assert isinstance(actor, LMActorNetwork)
    if request.resume:
        raise ConfigError(
            "train_agent cannot resume a language model (resume=True); to continue this run: "
            f"ludus train {request.save_path / request.run_name}/config.json --resume"
        )
    if not isinstance(critic, LMCriticNetwork):
        raise ConfigError(
            "the critic of a language model must be an LMCriticNetwork, got "
            f"{type(critic).__name__}"
        )
    task = TokenTask.inspect(
        request.env_name, actor.model_name, request.max_timesteps, request.seed
    )
    model_path = _write_models(actor, critic, task, request.save_path / f"{request.run_name}.start")
    run = make_run(request, task, model_path, actor.model)
    returns, latest = _run_to_end(_train(Trainer(run, overwrite=True), request))
    _copy_weights(actor.model, latest)
    _copy_weights(critic.model, latest / CRITIC_FOLDER)
    return returns


async def _train(trainer: Trainer, request: AgentRequest) -> tuple[EpisodeReturns, Path]:
    """Train; return the returns of the episodes and the folder of the latest weights."""
    returns = EpisodeReturns()
    async with trainer:
        async for step in trainer.steps():
            _record_returns(
                request,
                returns,
                [episode for episode in step.transcripts if episode.episode_return is not None],
            )
        await trainer.train()
        checkpoint = await trainer.save()
    return returns, model_folder(checkpoint)


def _record_returns(
    request: AgentRequest, returns: EpisodeReturns, episodes: Sequence[Transcript]
) -> None:
    """Append the returns of the episodes, and call the callback when due."""
    for episode in episodes:
        assert episode.episode_return is not None
        returns.append(episode.episode_return)
        if request.callback is None or len(returns) % request.log_interval:
            continue
        last = episode.turns[-1]
        request.callback(
            "".join(message.text for message in last.shown),
            last.answer,
            last.reward,
            episode.status == "terminated",
            episode.status == "truncated",
            len(returns),
            list(running_average(returns))[-1],
        )


def _write_models(
    actor: LMActorNetwork, critic: LMCriticNetwork, task: TokenTask, folder: Path
) -> Path:
    """Save both models, with a chat template that ends each completion with the EOS token.

    Returns:
        The absolute path of `folder`.

    Raises:
        ConfigError: the environment has more tokens than the model, or there is no EOS token.
    """
    tokenizer = load_tokenizer(actor.model_name)
    num_embeddings = actor.model.get_input_embeddings().weight.shape[0]
    if task.num_tokens > num_embeddings or tokenizer.eos_token is None:
        raise ConfigError(
            "the actor's model must have an EOS token and an embedding for each of the "
            f"environment's {task.num_tokens} tokens, got EOS token {tokenizer.eos_token!r} and "
            f"{num_embeddings} embeddings; use the same model for the environment and the actor"
        )
    tokenizer.chat_template = _PLAIN_TEMPLATE
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(folder) as temporary_folder:
        actor.model.save_pretrained(temporary_folder)
        tokenizer.save_pretrained(temporary_folder)
        critic.model.save_pretrained(temporary_folder / CRITIC_FOLDER)
        tokenizer.save_pretrained(temporary_folder / CRITIC_FOLDER)
    return folder.absolute()


def _copy_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of a checkpoint into the model."""
    state = load_file(folder / "model.safetensors")
    # The file contains tied weights only once.
    parameters = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)


def _run_to_end(training: Coroutine[Any, Any, _T]) -> _T:
    """Run the coroutine and return its result, even inside a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(training)
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(training))
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the caller
            future.set_exception(error)

    threading.Thread(target=run, name="train_agent").start()
    return future.result()
