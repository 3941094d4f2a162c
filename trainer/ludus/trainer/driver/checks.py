"""The configuration of a run, adapted to this machine and checked before the run starts.

`ludus train`, its `--dry-run` and `Trainer` share the checks. Nothing is written, and the weights
of models are not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch

from ludus.env import Message
from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import encode_transition
from ludus.env.environment import AnyEnvironment
from ludus.env.serving.subprocess import LocalServer
from ludus.env.targets.targets import check_environment_options
from ludus.env.types import StepResult, TextView
from ludus.proto.config import (
    CommandAgent,
    EnvironmentConfig,
    LanguageModelRun,
    LearnerConfig,
    LocalEnvironment,
    ModelCritic,
    PpoConfig,
    PretrainedModel,
    RewardModelTerm,
    RewardTerm,
    RolloutConfig,
    TransformersGenerator,
    VllmGenerator,
)
from ludus.proto.config.environment import make_reward_term_name
from ludus.proto.errors import ConfigError
from ludus.proto.memory_plan import MemoryPlan
from ludus.proto.paths import parse_path
from ludus.proto.runs import CHAT_TEMPLATE_FILE, Resume
from ludus.trainer.actors.placement import Roles, place_on_one_machine
from ludus.trainer.actors.ray_address import check_cluster, is_local
from ludus.trainer.actors.weight_store import check_reachable, resolve_location
from ludus.trainer.core.model_paths import (
    FINE_TUNED_FOLDER,
    is_fine_tuned_run,
    is_folder_path,
)
from ludus.trainer.core.output import warn_user
from ludus.trainer.driver.policy_chart import load_chart_prompts
from ludus.trainer.learner.actor_critic import check_same_tokens
from ludus.trainer.models import load
from ludus.trainer.models.chat import ChatTokenizer, count_chars, is_surely_longer
from ludus.trainer.rollout.adapters.environment_adapter import RendererError, make_renderer
from ludus.trainer.rollout.engines.vllm_process import check_vllm_build, is_vllm_installed
from ludus.trainer.rollout.legal_answers import LegalAnswers, check_answers
from ludus.trainer.rollout.runner import episode_limits
from ludus.trainer.run.checkpoint import RunState
from ludus.trainer.run.lifecycle import find_start, make_run_id
from ludus.trainer.setup.chat_template import check_chat_template
from ludus.trainer.setup.environments import ConnectedEnvironment, load_fixed_policies
from ludus.trainer.setup.first_prompts import MAX_FIRST_SEEDS, fetch_first_opening
from ludus.trainer.setup.memory.machine import read_machine
from ludus.trainer.setup.memory.refusals import check_memory
from ludus.trainer.setup.model_files import find_model
from ludus.trainer.setup.quick_checks import (
    CRITIC_HINT,
    REWARD_MODEL_HINT,
    check_folder,
    check_functions,
    check_remote_addresses,
    check_reward_columns,
    list_reward_functions,
)

_log = logging.getLogger(__name__)


def resolve_config(run: LanguageModelRun) -> LanguageModelRun:
    """Return the configuration adapted to this machine.

    If vLLM is not installed, transformers generates. Paths become absolute, because other
    processes of the run have other working folders.
    """
    updates: dict[str, object] = {}
    if isinstance(run.generator, VllmGenerator) and not is_vllm_installed():
        warn_user("vLLM is not installed here; using generator.kind = 'transformers' instead")
        updates["generator"] = TransformersGenerator()
    warn_of_emulation(run.learner)
    warn_of_unused_gpus(run)
    if isinstance(run.model, PretrainedModel):
        updates["model"] = resolve_model(run.model)
    if isinstance(run.algorithm, PpoConfig) and isinstance(run.algorithm.critic, ModelCritic):
        critic = run.algorithm.critic
        critic = critic.model_copy(update={"path": resolve_path(critic.path)})
        updates["algorithm"] = run.algorithm.model_copy(update={"critic": critic})
    environments = run.environments.items()
    updates["environments"] = {name: _resolve_environment(config) for name, config in environments}
    return run.model_copy(update=updates)


def warn_of_emulation(learner: LearnerConfig) -> None:
    """Warn the user if the learner computes in a type that this processor emulates."""
    is_on_cpu = is_local() and learner.num_gpus_per_rank == 0
    if learner.dtype == "bfloat16" and is_on_cpu and _is_bfloat16_emulated():
        warn_user(
            "this processor has no instructions for bfloat16 and computes far slower "
            "with it than with float32; set learner.dtype = 'float32'"
        )


def warn_of_unused_gpus(run: LanguageModelRun) -> None:
    """Warn the user if a pretrained model trains on the CPU of a machine that has GPUs."""
    num_reserved_gpus = run.learner.num_gpus_per_rank + run.rollout.num_gpus_per_worker
    num_gpus, is_pretrained = torch.cuda.device_count(), isinstance(run.model, PretrainedModel)
    if num_reserved_gpus or num_gpus == 0 or not (is_pretrained and is_local()):
        return
    share = 1 if num_gpus > 1 else 0.5
    warn_user(
        f"this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}, but the run uses none; set "
        f"learner.num_gpus_per_rank = {share} and rollout.num_gpus_per_worker = {share} to use "
        f"{'them' if num_gpus > 1 else 'it'}"
    )


def _is_bfloat16_emulated() -> bool:
    """Return whether this processor has no instructions for bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    has_instructions = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    is_x86 = capabilities["architecture"] == "x86_64"
    return is_x86 and not has_instructions


def resolve_model(model: PretrainedModel) -> PretrainedModel:
    """Return the model with absolute paths; the folder of a fine-tuning run names its model."""
    updates = {"chat_template": resolve_path(model.chat_template)}
    folder = parse_path(model.path)
    if is_fine_tuned_run(folder):
        updates["path"] = str((folder / FINE_TUNED_FOLDER).absolute())
    elif is_folder_path(model.path):
        updates["path"] = resolve_path(model.path)
    return model.model_copy(update=updates)


def check_start(run: LanguageModelRun, resume: Resume) -> None:
    """Check everything that could stop a run from starting."""
    check_importable_names(run)
    check_local_environments(run)
    asyncio.run(check_remote_addresses(run))
    tokenizer = check_models(run)
    if tokenizer is not None:
        check_local_prompts(run, tokenizer)
    if is_local():
        check_gpus(run)
        if isinstance(run.generator, VllmGenerator):
            check_vllm_build(has_gpu=run.rollout.num_gpus_per_worker > 0)
    else:
        check_cluster()
    check_reachable(resolve_location(run.weights, run.folder, make_run_id()))
    check_folder(run.folder)
    find_start(run, resume, RunState)


def check_importable_names(run: LanguageModelRun) -> None:
    """Check that every named function can be imported, and that the chart's prompts can be made.

    Many of these functions are first used after hours of training.
    """
    check_functions(run)
    load_chart_prompts(run)


def check_local_environments(run: LanguageModelRun) -> None:
    """Build each local environment once, and check its messages, columns and fixed policies."""
    for name, config in run.environments.items():
        if not isinstance(config, LocalEnvironment):
            continue
        environment = check_environment_options(config.package, config.options)
        try:
            if config.rollout is None and config.agent is None:
                _check_first_messages(run, name, config, environment)
        finally:
            environment.close()
        check_reward_columns(run, name, environment.tasks)
        load_fixed_policies(run, name, config.options)


def check_local_prompts(run: LanguageModelRun, tokenizer: ChatTokenizer) -> None:
    """Check that some first prompts of each local environment leave room for a completion.

    Prompts with tools are checked at the start, when the environment's server runs.
    """
    for name, config in run.environments.items():
        if not isinstance(config, LocalEnvironment) or config.rollout or config.agent:
            continue
        environment = check_environment_options(config.package, config.options)
        try:
            if not config.tools:
                _check_first_messages(run, name, config, environment, tokenizer)
        finally:
            environment.close()


async def check_server_columns(run: LanguageModelRun, servers: Mapping[str, LocalServer]) -> None:
    """Check the reward columns of the run's own servers.

    This check uses HTTP instead of gRPC, so that it may run before other processes are forked.
    Remote servers are checked after the run has connected to them.
    """
    for name, server in servers.items():
        if server.addresses is not None and list_reward_functions(run.environments[name]):
            async with await AsyncEnvClient.connect(server.addresses.http) as client:
                check_reward_columns(run, name, (await client.describe()).tasks)


async def check_first_prompts(
    run: LanguageModelRun,
    environments: Mapping[str, ConnectedEnvironment],
    tokenizer: ChatTokenizer,
) -> None:
    """Check the chat template, and that some first prompts leave room for a completion.

    If completions are restricted to legal answers, check the answers in the first states too.
    Episodes with a longer prompt are void. Rollout functions and agents make their own prompts, so
    they are not checked.
    """
    for name, environment in environments.items():
        if episode_limits(run, name).max_turns > 1:
            tokenizer.check_turns()
        if environment.config.rollout is not None or environment.config.agent is not None:
            continue
        limits = episode_limits(run, name)
        lengths = []
        for seed in range(MAX_FIRST_SEEDS):
            opening, first_result = await fetch_first_opening(environment, seed)
            if limits.constrain == "legal_answers":
                LegalAnswers(tokenizer, name, limits.max_completion_tokens).make_trie(first_result)
            if is_surely_longer(count_chars(opening.messages, opening.tools), limits.max_tokens):
                continue
            lengths.append(len(tokenizer.encode_first_prompt(opening.messages, opening.tools)))
            if lengths[-1] + limits.max_completion_tokens <= limits.max_tokens:
                break
        else:
            shortest_length = f"{min(lengths)} tokens" if lengths else "too many characters"
            raise _make_length_error(name, limits, shortest_length)


async def check_first_texts(
    run: LanguageModelRun, environments: Mapping[str, ConnectedEnvironment]
) -> None:
    """Check that some first prompts of each environment are short enough to be encoded.

    This check needs no tokenizer. The tokenizer of a tiny model is made from such texts.
    """
    for name, environment in environments.items():
        if environment.config.rollout is not None or environment.config.agent is not None:
            continue
        limits = episode_limits(run, name)
        lengths = []
        for seed in range(MAX_FIRST_SEEDS):
            opening, _ = await fetch_first_opening(environment, seed)
            lengths.append(count_chars(opening.messages, opening.tools))
            if not is_surely_longer(lengths[-1], limits.max_tokens):
                break
        else:
            raise _make_length_error(name, limits, f"{min(lengths)} characters")


def check_models(run: LanguageModelRun) -> ChatTokenizer | None:
    """Check the policy, the critic and the reward models; return a pretrained model's tokenizer."""
    tokenizer = None
    if isinstance(run.model, PretrainedModel):
        check_model_path(run.model.path)
        check_num_tokens(run.model.path)
        check_chat_template(run)
        tokenizer = _load_tokenizer(run, run.model)
    check_critic(run)
    check_reward_models(run)
    return tokenizer


def _load_tokenizer(run: LanguageModelRun, model: PretrainedModel) -> ChatTokenizer:
    """Return the tokenizer, whose chat template must be one that Ludus understands."""
    template_copy = run.folder / CHAT_TEMPLATE_FILE
    if model.chat_template is not None and template_copy.is_file():
        model = model.model_copy(update={"chat_template": str(template_copy)})
    return ChatTokenizer.load(model.path, model)


def check_model_path(path: str) -> None:
    """Check that there is a language model at a path."""
    load.load_config(find_model(path, "model.path"))


def check_num_tokens(path: str) -> None:
    """Check that a model has an embedding for each token of its tokenizer.

    Raises:
        NotFoundError: there is no tokenizer.
        ConfigError: the tokenizer has more tokens.
    """
    model_path = find_model(path, "model.path")
    num_embeddings: int = load.load_config(model_path).get_text_config().vocab_size
    num_tokens = max(load.load_tokenizer(model_path).get_vocab().values()) + 1
    if num_tokens > num_embeddings:
        raise ConfigError(
            f"model.path = '{path}': the tokenizer has {num_tokens} tokens, but the model has "
            f"embeddings for {num_embeddings}; call model.resize_token_embeddings({num_tokens}) "
            "and save the model again"
        )


def check_reward_models(run: LanguageModelRun) -> None:
    """Check that every reward model exists and has one output."""
    for name, environment in run.environments.items():
        field = f"{run.environment_section(name)}.rewards.path"
        terms = [term for term in environment.rewards if isinstance(term, RewardModelTerm)]
        for path in {term.path for term in terms}:
            load.check_reward_model(find_model(path, field, REWARD_MODEL_HINT), field)


def check_critic(run: LanguageModelRun) -> None:
    """Check that the critic exists and has the policy's vocabulary.

    The vocabulary of a tiny model is not known before it is made.
    """
    critic = run.algorithm.critic if isinstance(run.algorithm, PpoConfig) else None
    if not isinstance(critic, ModelCritic) or critic.path is None:
        return
    critic_path = find_model(critic.path, "algorithm.critic.path", CRITIC_HINT)
    if isinstance(run.model, PretrainedModel):
        check_same_tokens(critic_path, run.model.path)


def check_gpus(run: LanguageModelRun, roles: Roles = Roles.ALL) -> None:
    """Check that this machine has the GPUs of the actors with these roles."""
    demand, num_gpus = place_on_one_machine(run, roles).demand, torch.cuda.device_count()
    if not demand.fits([{"GPU": float(num_gpus)}]):
        raise ConfigError(
            f"this machine has {num_gpus} GPUs, but the run needs {demand}; lower "
            "learner.num_gpus_per_rank and rollout.num_gpus_per_worker, or join a cluster that has "
            "them with RAY_ADDRESS"
        )


def resolve_memory(run: LanguageModelRun) -> tuple[LanguageModelRun, MemoryPlan]:
    """Return the run with a size of micro-batches that fits, and its memory plan.

    Raises:
        ConfigError: the run would certainly run out of memory.
    """
    uses_gpus = run.learner.num_gpus_per_rank > 0 or run.rollout.num_gpus_per_worker > 0
    machine = read_machine(run.placement, is_local=is_local(), uses_gpus=uses_gpus)
    plan = check_memory(run, machine)
    update = {"max_tokens_per_micro_batch": plan.max_tokens_per_micro_batch}
    learner = run.learner.model_copy(update=update)
    return run.model_copy(update={"learner": learner}), plan


def _check_first_messages(
    run: LanguageModelRun,
    name: str,
    config: LocalEnvironment,
    environment: AnyEnvironment,
    tokenizer: ChatTokenizer | None = None,
) -> None:
    """Check the messages that start some episodes, and their length in tokens or characters."""
    limits = episode_limits(run, name)
    num_chars: list[int] = []
    num_tokens: list[int] = []
    for seed in range(MAX_FIRST_SEEDS):
        messages = _render_first_messages(
            name, config, environment, seed, needs_answers=limits.constrain == "legal_answers"
        )
        num_chars.append(count_chars(messages))
        if is_surely_longer(num_chars[-1], limits.max_tokens):
            continue
        if tokenizer is None or not messages:
            return
        num_tokens.append(len(tokenizer.encode_first_prompt(messages)))
        if num_tokens[-1] + limits.max_completion_tokens <= limits.max_tokens:
            return
    shortest = f"{min(num_tokens)} tokens" if num_tokens else f"{min(num_chars)} characters"
    raise _make_length_error(name, limits, shortest)


def _make_length_error(name: str, limits: RolloutConfig, shortest_length: str) -> ConfigError:
    return ConfigError(
        f"environment '{name}': first prompts must leave room for a completion of "
        f"rollout.max_completion_tokens = {limits.max_completion_tokens} within "
        f"rollout.max_tokens = {limits.max_tokens}, but the shortest prompt has "
        f"{shortest_length}; raise rollout.max_tokens, or shorten what the environment shows"
    )


def _render_first_messages(
    name: str,
    config: LocalEnvironment,
    environment: AnyEnvironment,
    seed: int,
    *,
    needs_answers: bool,
) -> list[Message]:
    """Return the messages that start an episode; empty if the environment fails or has no text.

    Failures of the environment void episodes; wrong messages, and missing legal answers if they are
    needed, end the start.
    """
    try:
        transition = environment.reset(seed=seed)
        encoded_result = encode_transition(transition, environment.text_renderer, step_index=0)
    except Exception as error:  # noqa: BLE001 - third-party code
        _log.warning("environment '%s' cannot start an episode: %s", name, error)
        return []
    text = None
    if needs_answers:
        check_answers(encoded_result.text.legal_answers if encoded_result.text else [], name)
    if encoded_result.text is not None:
        text = TextView(orjson.loads(encoded_result.text.messages_json), [])
    elif config.render is None:
        return []
    result = StepResult(orjson.loads(encoded_result.observation_json), text=text)
    try:
        return make_renderer(config, name).render_messages(result, is_first=True)
    except RendererError as error:
        raise ConfigError(str(error)) from error


def _resolve_environment(config: EnvironmentConfig) -> EnvironmentConfig:
    agent = config.agent
    if isinstance(agent, CommandAgent):
        agent = agent.model_copy(update={"folder": str(Path(agent.folder).absolute())})
    rewards = tuple(map(_resolve_reward, config.rewards))
    return config.model_copy(update={"agent": agent, "rewards": rewards})


def _resolve_reward(term: RewardTerm | RewardModelTerm) -> RewardTerm | RewardModelTerm:
    if not isinstance(term, RewardModelTerm):
        return term
    # The name is still derived from the original path, because metrics use it.
    name = make_reward_term_name(term)
    return term.model_copy(update={"path": resolve_path(term.path), "name": name})


def resolve_path(path: str | None) -> str | None:
    """Return an existing file or folder as an absolute path, and a Hugging Face id unchanged.

    A missing path keeps its path, so that the error names it as the user wrote it.
    """
    if path is None:
        return None
    folder = parse_path(path).absolute()
    return str(folder) if folder.exists() else path
