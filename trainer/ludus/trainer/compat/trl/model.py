"""Conversion of a script's model and tokenizer into the [model] section of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_config, load_tokenizer

ModelInput: TypeAlias = "str | Mapping[str, Any]"

_ROOM_FOR_TEXT, _ROOM_FOR_TOOLS = 256, 1024
"""Additional tokens for the text that a rollout function or tools add."""
_TINY_MAX_TOKENS = 512
_LORA_FIELDS = frozenset(
    {
        *("r", "lora_alpha", "target_modules", "lora_dropout"),
        *("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"),
    }
)
"""Fields of a `peft.LoraConfig` that are converted, or that do not describe the adapters."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The model of the run."""

    settings: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None
    """None if the model is created when the run starts."""
    max_positions: int | None
    """Maximum number of positions of the model; None if unknown."""

    def max_tokens(
        self, prompts: Sequence[str | list[Message]], args: GRPOConfig, *, with_tools: bool
    ) -> int:
        """Return the number of tokens of the longest prompt and the longest completion."""
        if args.vllm_max_model_length is not None:
            return int(args.vllm_max_model_length)
        if self.tokenizer is None:
            return int(self.settings.get("max_tokens", _TINY_MAX_TOKENS))
        chat = ChatTokenizer(self.tokenizer)
        max_prompt_tokens = max(_prompt_length(chat, prompt) for prompt in prompts)
        room = _ROOM_FOR_TOOLS if with_tools else _ROOM_FOR_TEXT
        num_tokens = max_prompt_tokens + int(args.max_completion_length or 0) + room
        return min(num_tokens, self.max_positions or num_tokens)


def model_section(
    model: ModelInput | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None,
    peft_config: Any,
    args: GRPOConfig,
    folder: Path,
) -> ModelSection:
    """Return the section; a model that is passed as an object is saved to `folder`."""
    lora = None if peft_config is None else _lora_settings(peft_config)
    if isinstance(model, Mapping):
        if processing_class is not None:
            raise ConfigError(
                f"processing_class = {type(processing_class).__name__} must be None, because a "
                "model that is created when the run starts brings its own tokenizer"
            )
        thinking = _thinking_settings(args) if args.chat_template_kwargs else {}
        return ModelSection({**thinking, **model, **({"lora": lora} if lora else {})}, None, None)
    if not isinstance(model, (str, PreTrainedModel)):
        raise ConfigError(
            "model must be a Hugging Face id, the path of a folder as text, a model of "
            f"transformers or a [model] section, but it is {model!r:.80}"
        )
    if isinstance(model, str):
        load_config(model)
    path = _find_folder(model, processing_class, folder)
    settings = {"kind": "pretrained", "path": path, "lora": lora, **_thinking_settings(args)}
    config = AutoConfig.from_pretrained(path)
    positions = getattr(config, "max_position_embeddings", None)
    return ModelSection(settings, load_tokenizer(path), positions)


def _find_folder(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> str:
    if isinstance(model, str):
        if tokenizer is None or _are_equal(tokenizer, load_tokenizer(model)):
            return model
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    elif tokenizer is None:
        model_path = model.config.name_or_path
        if not model_path:
            raise ConfigError(
                "processing_class is None, but a model that is passed as an object needs its "
                "tokenizer; pass it"
            )
        tokenizer = load_tokenizer(model_path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder.absolute())


def _are_equal(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    return (first.get_vocab(), first.chat_template, first.eos_token) == (
        second.get_vocab(),
        second.chat_template,
        second.eos_token,
    )


def _thinking_settings(args: GRPOConfig) -> dict[str, Any]:
    arguments = dict(args.chat_template_kwargs or {})
    settings = {"enable_thinking": bool(arguments.pop("enable_thinking", False))}
    if arguments:
        raise ConfigError(
            "GRPOConfig.chat_template_kwargs supports only enable_thinking, but has "
            f"{sorted(arguments)}; put the rest into the prompts"
        )
    return settings


def _lora_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the adapters in a `peft.LoraConfig`."""
    if type(config).__name__ != "LoraConfig" or getattr(config, "use_dora", False):
        raise ConfigError(
            f"peft_config must be a peft.LoraConfig, but it is a {type(config).__name__}; pass one"
        )
    settings: dict[str, Any] = {"rank": config.r, "alpha": config.lora_alpha}
    _refuse_other_fields(config)
    if isinstance(config.target_modules, str):
        raise ConfigError(
            f"peft_config.target_modules = '{config.target_modules}' is not supported; "
            "pass a list of layer names, such as ['q_proj', 'k_proj', 'v_proj', 'o_proj', "
            "'gate_proj', 'up_proj', 'down_proj']"
        )
    if config.target_modules is not None:
        settings["targets"] = sorted(config.target_modules)
    if config.lora_dropout:
        raise ConfigError(
            f"peft_config.lora_dropout = {config.lora_dropout} is not supported and must be 0, "
            "because dropout would make sampler and learner different policies"
        )
    return settings


def _refuse_other_fields(config: Any) -> None:
    """Refuse all settings of a peft.LoraConfig except rank, scale and layers."""
    defaults = type(config)()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _LORA_FIELDS and value != getattr(defaults, field.name):
            raise ConfigError(
                f"peft_config.{field.name} = {value!r:.60} is not supported, expected "
                f"{getattr(defaults, field.name)!r}; remove it"
            )


def _prompt_length(chat: ChatTokenizer, prompt: str | list[Message]) -> int:
    if not isinstance(prompt, str):
        return len(chat.first_prompt(prompt))
    # A rollout function may send the text unchanged, or as a user message.
    return max(
        len(chat.text_ids(prompt)),
        len(chat.first_prompt([{"role": "user", "content": prompt}])),
    )
