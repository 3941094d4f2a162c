"""The configuration of a run, adapted to this machine."""

from __future__ import annotations

from pathlib import Path

from ludus.proto.config import (
    AgentConfig,
    CommandAgent,
    LanguageModelRun,
    ModelCritic,
    PpoConfig,
    PretrainedModel,
    RewardModelTerm,
    RewardTerm,
    TransformersGenerator,
    VllmGenerator,
)
from ludus.proto.config.environment import reward_term_name
from ludus.trainer.core.output import warn_user
from ludus.trainer.models.load import is_folder_path
from ludus.trainer.rollout.engines.vllm_process import has_vllm


def resolve_config(run: LanguageModelRun) -> LanguageModelRun:
    """Return the configuration as this machine can run it.

    If vLLM is not installed, transformers generates. Paths become absolute, because other
    processes of the run have other working folders.
    """
    changes: dict[str, object] = {}
    if isinstance(run.generator, VllmGenerator) and not has_vllm():
        warn_user("vLLM is not installed here; using generator.kind = 'transformers' instead")
        changes["generator"] = TransformersGenerator()
    if isinstance(run.model, PretrainedModel) and is_folder_path(run.model.path):
        changes["model"] = run.model.model_copy(update={"path": _resolve_path(run.model.path)})
    if isinstance(run.algorithm, PpoConfig) and isinstance(run.algorithm.critic, ModelCritic):
        critic = run.algorithm.critic
        resolved_critic = critic.model_copy(update={"path": _resolve_path(critic.path)})
        changes["algorithm"] = run.algorithm.model_copy(update={"critic": resolved_critic})
    changes["environments"] = {
        name: environment.model_copy(
            update={
                "agent": _resolve_agent(environment.agent),
                "rewards": tuple(map(_resolve_reward, environment.rewards)),
            }
        )
        for name, environment in run.environments.items()
    }
    return run.model_copy(update=changes)


def _resolve_agent(agent: AgentConfig | None) -> AgentConfig | None:
    if not isinstance(agent, CommandAgent):
        return agent
    return agent.model_copy(update={"folder": str(Path(agent.folder).absolute())})


def _resolve_reward(term: RewardTerm | RewardModelTerm) -> RewardTerm | RewardModelTerm:
    if not isinstance(term, RewardModelTerm):
        return term
    # The name keeps following from the original path, because metrics use it.
    name = reward_term_name(term)
    return term.model_copy(update={"path": _resolve_path(term.path), "name": name})


def _resolve_path(path: str | None) -> str | None:
    """Return an existing folder as an absolute path, and a Hugging Face id unchanged.

    A missing folder keeps its path, so that the error names it as the user wrote it.
    """
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    return str(folder) if folder.exists() else path
