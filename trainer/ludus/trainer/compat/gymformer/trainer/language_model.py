"""Trains a language model in a token-level environment: `train_agent` as a run of Ludus.

    AgentRequest --TokenTask--> LanguageModelRun --Trainer--> episodes' returns
    both models  --a folder---> the run's start        |
         ^--------- their newest weights --------------+

Answers are sampled as a whole, with a KV cache, and stepped into the environment token by token;
PPO credits each token with generalised advantages. What the environment calls `kl_coef` is the
price of the divergence from the starting policy, taken off the reward of each token.
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

# Messages of canary prompts are all that goes through it; episodes are tokens.
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def train_language_model(request: AgentRequest) -> EpisodeReturns:
    """The return of each episode; actor and critic have the weights that were reached.

    Raises:
        UserError: the environment or the networks do not fit.
    """
    actor, critic = request.actor, request.critic
    assert isinstance(actor, LMActorNetwork)
    if request.resume:
        raise ConfigError(
            "train_agent continues networks alone, got resume=True with a language model; its run "
            f"goes on with: ludus train {request.save_path / request.run_name}/config.json --resume"
        )
    if not isinstance(critic, LMCriticNetwork):
        raise ConfigError(
            "a language model is trained beside a critic that reads tokens, expected an "
            f"LMCriticNetwork, got {type(critic).__name__}"
        )
    task = TokenTask.of(request.env_name, actor.model_name, request.max_timesteps, request.seed)
    start = _write_start(actor, critic, task, request.save_path / f"{request.run_name}.start")
    run = make_run(request, task, start, actor.model)
    returns, newest = _finished(_train(Trainer(run, overwrite=True), request))
    _take_weights(actor.model, newest)
    _take_weights(critic.model, newest / CRITIC_FOLDER)
    return returns


async def _train(trainer: Trainer, request: AgentRequest) -> tuple[EpisodeReturns, Path]:
    """The episodes' returns, and the folder of the newest weights."""
    returns = EpisodeReturns()
    async with trainer:
        async for step in trainer.steps():
            episodes = [one for one in step.transcripts if one.episode_return is not None]
            _tell(request, returns, episodes)
        await trainer.train()
        newest = await trainer.save()
    return returns, model_folder(newest)


def _tell(request: AgentRequest, returns: EpisodeReturns, episodes: Sequence[Transcript]) -> None:
    """Add the episodes' returns, and call back where one is due."""
    for episode in episodes:
        assert episode.episode_return is not None
        returns.append(episode.episode_return)
        if request.callback is None or len(returns) % request.log_interval:
            continue
        last = episode.turns[-1]
        request.callback(
            "".join(said.text for said in last.shown),
            last.answer,
            last.reward,
            episode.status == "terminated",
            episode.status == "truncated",
            len(returns),
            list(running_average(returns))[-1],
        )


def _write_start(
    actor: LMActorNetwork, critic: LMCriticNetwork, task: TokenTask, folder: Path
) -> Path:
    """The folder of both models as they are now, whose answers end with the tokenizer's end token.

    Raises:
        ConfigError: the environment's tokens are not the model's.
    """
    tokenizer = load_tokenizer(actor.model_name)
    known = actor.model.get_input_embeddings().weight.shape[0]
    if task.num_tokens > known or tokenizer.eos_token is None:
        raise ConfigError(
            f"expected a model with an end token and an embedding for each of the environment's "
            f"{task.num_tokens} tokens, got {known} and end token {tokenizer.eos_token!r}; give "
            "environment and actor the same model"
        )
    tokenizer.chat_template = _PLAIN_TEMPLATE
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(folder) as aside:
        actor.model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        critic.model.save_pretrained(aside / CRITIC_FOLDER)
        tokenizer.save_pretrained(aside / CRITIC_FOLDER)
    return folder.absolute()


def _take_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of a checkpoint into the model."""
    state = load_file(folder / "model.safetensors")
    # Tied weights are written once.
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def _finished(training: Coroutine[Any, Any, _T]) -> _T:
    """What it returns, also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(training)
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(training))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="train_agent").start()
    return done.result()
