"""A model and a tokenizer of a script as the [model] section of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.settings.config import GRPOConfig
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import check_language_model, load_tokenizer

ModelInput: TypeAlias = "str | Mapping[str, Any]"

_ROOM_FOR_TEXT, _ROOM_FOR_TOOLS = 256, 1024
"""Tokens beyond prompt and completion, for what a rollout function or tools put around them."""
_TINY_MAX_TOKENS = 512
_LORA_FIELDS = frozenset(
    {
        *("r", "lora_alpha", "target_modules", "lora_dropout"),
        *("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"),
    }
)
"""Of a `peft.LoraConfig`: what is taken or refused, and what says nothing of the adapters."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """What the run is told of its model."""

    settings: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None
    """None where the model is made when the run begins."""
    max_positions: int | None
    """Tokens that the model can tell apart by their places."""

    def max_tokens(
        self, prompts: Sequence[str | list[Message]], args: GRPOConfig, *, with_tools: bool
    ) -> int:
        """Tokens of the longest prompt and the longest completion together."""
        if args.vllm_max_model_length is not None:
            return int(args.vllm_max_model_length)
        if self.tokenizer is None:
            return int(self.settings.get("max_tokens", _TINY_MAX_TOKENS))
        chat = ChatTokenizer(self.tokenizer)
        longest = max(_length(chat, prompt) for prompt in prompts)
        room = _ROOM_FOR_TOOLS if with_tools else _ROOM_FOR_TEXT
        wanted = longest + int(args.max_completion_length or 0) + room
        return min(wanted, self.max_positions or wanted)


def model_section(
    model: ModelInput | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None,
    peft_config: Any,
    args: GRPOConfig,
    folder: Path,
) -> ModelSection:
    """The section; what is passed as an object is written to `folder`.

    Raises:
        ConfigError: a model without a tokenizer, or adapters of a form that is not trained.
    """
    lora = None if peft_config is None else _lora(peft_config)
    if isinstance(model, Mapping):
        if processing_class is not None:
            raise ConfigError(
                "processing_class expected None beside a model that is made when the run begins, "
                f"got {type(processing_class).__name__}; such a model brings its own tokenizer"
            )
        thinking = _thinking(args) if args.chat_template_kwargs else {}
        return ModelSection({**thinking, **model, **({"lora": lora} if lora else {})}, None, None)
    if not isinstance(model, (str, PreTrainedModel)):
        raise ConfigError(
            "model expected a Hugging Face id, the text of a folder's path, a model of "
            f"transformers or a [model] section, got {model!r:.80}"
        )
    if isinstance(model, str):
        check_language_model(model)
    path = _folder_of(model, processing_class, folder)
    settings = {"kind": "pretrained", "path": path, "lora": lora, **_thinking(args)}
    config = AutoConfig.from_pretrained(path)
    positions = getattr(config, "max_position_embeddings", None)
    return ModelSection(settings, load_tokenizer(path), positions)


def _folder_of(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> str:
    if isinstance(model, str):
        if tokenizer is None or _is_same(tokenizer, load_tokenizer(model)):
            return model
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    elif tokenizer is None:
        known = model.config.name_or_path
        if not known:
            raise ConfigError(
                "processing_class expected the tokenizer of a model that is passed as an object, "
                "got None; pass it"
            )
        tokenizer = load_tokenizer(known)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder.absolute())


def _is_same(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    return (one.get_vocab(), one.chat_template, one.eos_token) == (
        other.get_vocab(),
        other.chat_template,
        other.eos_token,
    )


def _thinking(args: GRPOConfig) -> dict[str, Any]:
    wanted = dict(args.chat_template_kwargs or {})
    settings = {"enable_thinking": bool(wanted.pop("enable_thinking", False))}
    if wanted:
        raise ConfigError(
            "GRPOConfig.chat_template_kwargs expected enable_thinking alone, got "
            f"{sorted(wanted)}; put the rest into the prompts"
        )
    return settings


def _lora(config: Any) -> dict[str, Any]:
    """The adapters of a `peft.LoraConfig`."""
    if type(config).__name__ != "LoraConfig" or getattr(config, "use_dora", False):
        raise ConfigError(
            f"peft_config expected a peft.LoraConfig, got {type(config).__name__}; pass one"
        )
    settings: dict[str, Any] = {"rank": config.r, "alpha": config.lora_alpha}
    _refuse_other_adapters(config)
    if isinstance(config.target_modules, str):
        raise ConfigError(
            f"peft_config.target_modules = '{config.target_modules}' is not honoured here, "
            "expected a list of layers' names, such as ['q_proj', 'k_proj', 'v_proj', 'o_proj', "
            "'gate_proj', 'up_proj', 'down_proj']"
        )
    if config.target_modules is not None:
        settings["targets"] = sorted(config.target_modules)
    if config.lora_dropout:
        raise ConfigError(
            f"peft_config.lora_dropout = {config.lora_dropout} is not honoured here, expected 0: "
            "sampler and learner would be two policies"
        )
    return settings


def _refuse_other_adapters(config: Any) -> None:
    """Refuse what a peft.LoraConfig asks for beside rank, scale and layers."""
    plain = type(config)()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _LORA_FIELDS and value != getattr(plain, field.name):
            raise ConfigError(
                f"peft_config.{field.name} = {value!r:.60} is not honoured here, expected "
                f"{getattr(plain, field.name)!r}; leave it out"
            )


def _length(chat: ChatTokenizer, prompt: str | list[Message]) -> int:
    if not isinstance(prompt, str):
        return len(chat.first_prompt(prompt))
    # A rollout function may send it as it is, or as a user's words.
    return max(
        len(chat.text_ids(prompt)),
        len(chat.first_prompt([{"role": "user", "content": prompt}])),
    )
