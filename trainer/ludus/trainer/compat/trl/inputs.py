"""Conversion of the objects that a script passes to GRPOTrainer.

data set: list of rows, columns by name, or `datasets.Dataset` --> file of rows for prompts_env
model and tokenizer                                            --> section [model]
reward functions                                               --> terms of environment.rewards
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ludus.env import Message
from ludus.env.encoding import replace_nan
from ludus.env.types import find_extra_field, format_extra_field_error
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.tools import environment_reward
from ludus.trainer.core.functions import get_or_register_path
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_config, load_tokenizer
from ludus.trainer.rollout.rewards.arguments import STANDARD_ARGUMENTS

PROMPT_COLUMN = "prompt"

Row = Mapping[str, Any]
_JSON_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
ModelInput: TypeAlias = "str | Mapping[str, Any]"

_NUM_TEXT_TOKENS, _NUM_TOOL_TOKENS = 256, 1024
"""Additional tokens for the text that a rollout function or tools add."""
_TINY_MAX_TOKENS = 512
_LORA_FIELDS = frozenset(
    {
        *("r", "lora_alpha", "target_modules", "lora_dropout"),
        *("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"),
    }
)
"""Fields of a `peft.LoraConfig` that are converted, or that have no effect on the adapters."""
_UNAVAILABLE_ARGUMENTS = frozenset({"trainer_state", "log_extra", "log_metric"})
"""Arguments that TRL passes to reward functions and Ludus does not, because they need its
trainer."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a data set, each with a prompt."""

    rows: Sequence[Row]

    @classmethod
    def read(cls, dataset: Any, name: str) -> PromptRows:
        """Return the rows of the data set that a script passes as argument `name`."""
        rows = _list_rows(dataset, name)
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or not _is_prompt(row.get(PROMPT_COLUMN)):
                invalid_prompt = row.get(PROMPT_COLUMN) if isinstance(row, Mapping) else row
                raise ConfigError(
                    f"{name}: row {number} needs a '{PROMPT_COLUMN}' of text or of messages like "
                    f"{{'role': 'user', 'content': '...'}}, but has {invalid_prompt!r:.80}"
                )
            _refuse_extra_fields(row[PROMPT_COLUMN], f"{name}: row {number}")
        if not rows:
            raise ConfigError(f"{name} has no rows; pass at least one")
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> set[str]:
        """Names of all columns except the prompt."""
        return {key for row in self.rows for key in row} - {PROMPT_COLUMN}

    @property
    def prompts(self) -> list[str | list[Message]]:
        """Prompts of all rows."""
        return [row[PROMPT_COLUMN] for row in self.rows]

    def write(self, path: Path) -> None:
        """Write the rows atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_suffix(".partial")
        with partial_path.open("wb") as file:
            for number, row in enumerate(self.rows):
                try:
                    file.write(orjson.dumps(replace_nan(row), option=_JSON_OPTIONS))
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"row {number} contains a value that JSON does not support ({error}); "
                        "convert it to text, numbers, lists or dictionaries"
                    ) from None
        partial_path.replace(path)


def _list_rows(dataset: Any, name: str) -> list[Any]:
    if isinstance(dataset, Mapping):
        return _columns_to_rows(dataset, name)
    if isinstance(dataset, Iterable) and not isinstance(dataset, (str, bytes)):
        return list(dataset)
    raise ConfigError(
        f"{name} must be a list of dictionaries, columns by name, or a datasets.Dataset, but it is "
        f"{dataset!r:.80}; load a file with datasets.load_dataset"
    )


def _columns_to_rows(dataset: Mapping[Any, Any], name: str) -> list[Any]:
    if any(hasattr(column, "column_names") for column in dataset.values()):
        splits = sorted(map(str, dataset))
        raise ConfigError(f"{name} must be one data set, but it has the splits {splits}; pass one")
    for key, column in dataset.items():
        if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
            raise ConfigError(
                f"{name} needs a list of values, one per row, in column '{key}', but it has "
                f"{column!r:.60}"
            )
    columns = {str(key): list(column) for key, column in dataset.items()}
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{name} must have columns of one length, but has {lengths}")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
    )


def _refuse_extra_fields(prompt: str | list[Message], location: str) -> None:
    for number, message in enumerate(() if isinstance(prompt, str) else prompt):
        if extra_name := find_extra_field(message):
            raise ConfigError(f"{location}: {format_extra_field_error(extra_name, number)}")


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The section [model] of the run, with the properties that other sections depend on."""

    settings: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None
    """None if the model is created when the run starts."""
    max_positions: int | None
    """Maximum number of positions of the model; None if unknown."""

    def find_max_tokens(
        self, prompts: Sequence[str | list[Message]], args: GRPOConfig, *, uses_tools: bool
    ) -> int:
        """Return the maximum number of tokens of a prompt and its completion together."""
        if args.vllm_max_model_length is not None:
            return int(args.vllm_max_model_length)
        if self.tokenizer is None:
            return int(self.settings.get("max_tokens", _TINY_MAX_TOKENS))
        chat = ChatTokenizer(self.tokenizer)
        max_prompt_tokens = max(_count_prompt_tokens(chat, prompt) for prompt in prompts)
        num_extra_tokens = _NUM_TOOL_TOKENS if uses_tools else _NUM_TEXT_TOKENS
        num_tokens = max_prompt_tokens + int(args.max_completion_length or 0) + num_extra_tokens
        return min(num_tokens, self.max_positions or num_tokens)


def make_model_section(
    model: ModelInput | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None,
    peft_config: Any,
    args: GRPOConfig,
    folder: Path,
) -> ModelSection:
    """Return the section of a model. A model that is passed as an object is saved to `folder`."""
    lora = None if peft_config is None else _make_lora_settings(peft_config)
    if isinstance(model, Mapping):
        if processing_class is not None:
            raise ConfigError(
                f"processing_class = {type(processing_class).__name__} must be None, because a "
                "model that is created when the run starts brings its own tokenizer"
            )
        settings = _make_thinking_settings(args) if args.chat_template_kwargs else {}
        settings |= {**model, "lora": lora} if lora else model
        return ModelSection(settings, None, None)
    if not isinstance(model, (str, PreTrainedModel)):
        raise ConfigError(
            "model must be a Hugging Face id, the path of a folder as text, a model of "
            f"transformers or a [model] section, but it is {model!r:.80}"
        )
    config = load_config(model) if isinstance(model, str) else model.config
    path = _find_folder(model, processing_class, folder)
    settings = {"kind": "pretrained", "path": path, "lora": lora, **_make_thinking_settings(args)}
    max_positions = getattr(config, "max_position_embeddings", None)
    return ModelSection(settings, load_tokenizer(path), max_positions)


def _find_folder(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> str:
    if isinstance(model, str):
        if tokenizer is None or _are_equal(tokenizer, load_tokenizer(model)):
            return model
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
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


def _are_equal(*tokenizers: PreTrainedTokenizerBase) -> bool:
    vocab, other_vocab = (tokenizer.get_vocab() for tokenizer in tokenizers)
    texts = {(tokenizer.chat_template, tokenizer.eos_token) for tokenizer in tokenizers}
    return vocab == other_vocab and len(texts) == 1


def _make_thinking_settings(args: GRPOConfig) -> dict[str, Any]:
    arguments = dict(args.chat_template_kwargs or {})
    settings = {"enable_thinking": bool(arguments.pop("enable_thinking", False))}
    if arguments:
        raise ConfigError(
            "GRPOConfig.chat_template_kwargs supports only enable_thinking, but has "
            f"{sorted(arguments)}; put the rest into the prompts"
        )
    return settings


def _make_lora_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the adapters in a `peft.LoraConfig`."""
    if type(config).__name__ != "LoraConfig":
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


def _count_prompt_tokens(chat: ChatTokenizer, prompt: str | list[Message]) -> int:
    if not isinstance(prompt, str):
        return len(chat.encode_first_prompt(prompt))
    # A rollout function may send the text unchanged, or as a user message.
    return max(
        len(chat.encode_text(prompt)),
        len(chat.encode_first_prompt([{"role": "user", "content": prompt}])),
    )


def make_reward_terms(
    reward_funcs: Any,
    weights: Sequence[float] | None,
    columns: Mapping[str, Set[str]],
    environment_term: str | None = None,
) -> list[dict[str, Any]]:
    """Return the terms of the reward, in the order of the functions. Repeated names get a number.

    Args:
        columns: columns of each data set; empty if a rollout function may add columns.
        environment_term: name of an additional term of weight 1 for environments that score
            episodes themselves.
    """
    if not isinstance(reward_funcs, (list, tuple)):
        reward_funcs = [reward_funcs]
    functions = [function for function in reward_funcs if function is not None]
    if not functions and environment_term is None:
        raise ConfigError("reward_funcs needs at least one function; pass one")
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"GRPOConfig.reward_weights has {len(weights)} numbers, but there are {len(functions)} "
            "reward functions; pass one number for each"
        )
    terms: list[dict[str, Any]] = []
    for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        term = _make_term(function, columns)
        names = [other_term["name"] for other_term in terms]
        name = _find_free_name(term.pop("name", None), names)
        terms.append({**term, "name": name, "weight": float(weight)})
    if environment_term is not None:
        path = get_or_register_path(environment_reward)
        terms.append({"function": path, "name": environment_term, "optional": True})
    return terms


def _find_free_name(name: str | None, used_names: Sequence[str | None]) -> str | None:
    """Return the name, with a number appended if the name is already used."""
    if name is None or name not in used_names:
        return name
    candidates = (f"{name}_{number}" for number in itertools.count(2))
    return next(candidate for candidate in candidates if candidate not in used_names)


def _make_term(function: Any, columns: Mapping[str, Set[str]]) -> dict[str, Any]:
    if isinstance(function, str):
        return {"kind": "model", "path": function}
    if not callable(function) or isinstance(function, nn.Module):
        raise ConfigError(
            f"reward_funcs must be functions, or ids and folders of reward models, but one is "
            f"{function!r:.100}; save a model with save_pretrained, and pass its folder"
        )
    name = getattr(function, "__name__", None)
    names = _find_required_arguments(function, name or repr(function))
    for dataset, dataset_columns in columns.items():
        absent_names = sorted(names - dataset_columns - STANDARD_ARGUMENTS)
        if absent_names:
            raise ConfigError(
                f"reward function '{name or function}' requires '{absent_names[0]}', which "
                f"{dataset} does not have; its arguments must be in "
                f"{sorted(dataset_columns | STANDARD_ARGUMENTS)}"
            )
    # As in TRL, functions of several environments return None for the rows of the others.
    return {"function": get_or_register_path(function), "name": name, "optional": True}


def _find_required_arguments(function: Any, name: str) -> Set[str]:
    """Return the names of the parameters without a default."""
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise ConfigError(
            f"reward function '{name}' must have named parameters, but it is a builtin without a "
            "signature; call it in a Python function"
        ) from None
    names = {
        parameter.name
        for parameter in parameters
        if parameter.kind in keyword_kinds and parameter.default is parameter.empty
    }
    unavailable_names = sorted(names & _UNAVAILABLE_ARGUMENTS)
    if unavailable_names:
        raise ConfigError(
            f"reward function '{name}' requires '{unavailable_names[0]}', which is not available, "
            "because the model is trained in another process; for a metric, use a function of "
            "weight 0 in reward_weights"
        )
    return names
