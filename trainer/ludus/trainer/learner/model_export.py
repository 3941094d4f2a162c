"""Export of the policy, and of a critic, as folders that Hugging Face loads.

FOLDER/            weights of the policy, config, tokenizer, generation settings
    adapter/       the adapters alone, for peft
    critic/        a critic with its own model
    value_head.safetensors
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ludus.proto.config import LoraConfig
from ludus.trainer.core.types import SavedFile
from ludus.trainer.learner import lora
from ludus.trainer.learner.actor_critic import ActorCritic
from ludus.trainer.learner.model import gather_parameters
from ludus.trainer.learner.weight_export import MAX_FILE_BYTES, export_weights
from ludus.trainer.learner.write_errors import convert_write_errors

_VALUE_HEAD_FILE = "value_head.safetensors"
_CRITIC_FOLDER = "critic"


class ExportSettings(NamedTuple):
    """Settings of the exported model that the modules do not contain."""

    tokenizer: PreTrainedTokenizerBase
    base_model_path: str
    """Path of the model under the adapters."""
    lora_config: LoraConfig | None
    max_file_bytes: int = MAX_FILE_BYTES


@torch.no_grad()
def export_model(model: ActorCritic, folder: Path, settings: ExportSettings) -> list[SavedFile]:
    """Write the models, and return the files that this rank wrote.

    A collective. Rank 0 writes all files other than the weights.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    language_model, critic = model.policy.language_model, model.critic
    lora_config, max_file_bytes = settings.lora_config, settings.max_file_bytes
    is_first_rank = dist.get_rank() == 0
    adapters = value_head = None
    if lora_config is not None:
        adapters = lora.gather_adapters(language_model, keeps_copies=is_first_rank)
    if model.policy.value_head is not None:
        parameters = model.policy.value_head.named_parameters()
        value_head = gather_parameters(parameters, keeps_copies=is_first_rank)
    paths = export_weights(language_model, folder, lora_config, max_file_bytes=max_file_bytes)
    if critic is not None:
        critic_folder = folder / _CRITIC_FOLDER
        paths += export_weights(critic.classifier, critic_folder, max_file_bytes=max_file_bytes)
    # No collective follows, so an error of the first rank keeps no other rank waiting.
    if is_first_rank:
        with convert_write_errors(folder):
            _save_settings(language_model.config, settings.tokenizer, folder)
            # Unlike save_pretrained, this accepts the sampling settings of every published model.
            language_model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
            if critic is not None:
                _save_settings(critic.classifier.config, settings.tokenizer, critic_folder)
            if lora_config is not None and adapters is not None:
                adapter_folder = folder / lora.ADAPTER_FOLDER
                lora.save_adapters(adapter_folder, adapters, lora_config, settings.base_model_path)
                paths += adapter_folder.glob("*.safetensors")
            if value_head is not None:
                paths.append(folder / _VALUE_HEAD_FILE)
                save_file(value_head, paths[-1])
        # The other ranks write only .safetensors files.
        paths += (path for path in folder.rglob("*") if path.suffix != ".safetensors")
    return [SavedFile.from_path(path) for path in sorted({*paths}) if path.is_file()]


def _save_settings(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the configuration and the tokenizer of an exported model."""
    config = copy.deepcopy(config)
    # The frozen weights under adapters may have another type.
    config.dtype = torch.float32
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
