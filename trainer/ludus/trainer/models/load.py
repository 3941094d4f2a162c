"""Loading of language models and tokenizers from folders and from Hugging Face.

Code in a model's folder is never run. Without `trust_remote_code=False`, transformers asks on the
terminal whether to run the code.
"""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
import transformers
from huggingface_hub import constants as hub
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ludus.proto.config import ModelConfig, PretrainedModel
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import describe_place
from ludus.trainer.models.sharded_reading import Prepare, load_prepared
from ludus.trainer.models.weight_files import find_weight_problem

# In the log of a job, each update of a progress bar is a line.
transformers_logging.disable_progress_bar()

_log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0
_TOKENIZER_FILES = ("*token*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
"""Names of which every tokenizer has at least one."""
_CLASSIFIER_SUFFIX = "ForSequenceClassification"
_CLASSIFIER_HEAD = "score."
"""Prefix of the names of the weights in a classifier's head."""
_FAST_TOKENIZER_CLASS = "TokenizersBackend"
"""Class name that transformers saves for a tokenizer whose tokenizer.json is complete."""


def load_config(path: str | Path, field: str = "model.path") -> PretrainedConfig:
    """Load the configuration of a model, a small file, from a folder or a Hugging Face id.

    `field` is the name of the configuration field, for messages.

    Raises:
        NotFoundError: there is no model.
    """
    with _shorten_errors(path, field) as is_local:
        return transformers.AutoConfig.from_pretrained(
            path, local_files_only=is_local, trust_remote_code=False
        )


def load_language_model(
    path: str | Path,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    *,
    prepare: Prepare | None = None,
    renamings: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """Load a causal language model from a folder or a Hugging Face id.

    Args:
        dtype: type of the weights; "auto" uses the type in the files.
        prepare: function that shards the model before its weights are read (see `load_prepared`).
        renamings: new parts of the weights' names, by regular expressions for the parts in the
            files.

    Raises:
        NotFoundError: there is no model, or its files are not complete.
    """
    with _shorten_errors(path) as is_local:
        return _load_weights(
            transformers.AutoModelForCausalLM,
            path,
            prepare,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=is_local,
            trust_remote_code=False,
            adapter_kwargs={"local_files_only": is_local},
            key_mapping=renamings,
        )


def check_reward_model(path: str | Path, field: str = "path") -> None:
    """Check that there is a single-label sequence classifier, without loading its weights.

    Raises:
        NotFoundError: there is no model.
        ConfigError: the model is of another kind.
    """
    config = load_config(path, field)
    if not _is_single_label_classifier(config):
        raise ConfigError(
            f"{field} = '{path}' must be a reward model, which is a sequence classifier with "
            f"num_labels = 1, got {', '.join(config.architectures or []) or 'an unknown model'} "
            f"with num_labels = {config.num_labels}; train a reward model with "
            "`ludus train-reward`"
        )


def is_reward_model(path: str | Path) -> bool:
    """Return whether the model is a single-label sequence classifier, without loading its weights.

    Raises:
        NotFoundError: there is no model.
    """
    return _is_single_label_classifier(load_config(path))


def load_sequence_classifier(
    path: str | Path,
    dtype: torch.dtype,
    *,
    allows_new_head: bool = False,
    prepare: Prepare | None = None,
) -> PreTrainedModel:
    """Load a single-label sequence classifier from a folder or a Hugging Face id.

    With `allows_new_head`, a causal language model is accepted too, and gets a random head.
    `prepare` shards the model before its weights are read (see `load_prepared`).

    Raises:
        NotFoundError: there is no model, or its files are not complete.
        ConfigError: the model is of another kind.
    """
    if not allows_new_head:
        check_reward_model(path)
    with (
        _shorten_errors(path, "model" if allows_new_head else "path") as is_local,
        _silence_transformers(),
    ):
        return _load_weights(
            transformers.AutoModelForSequenceClassification,
            path,
            prepare,
            optional_prefix=_CLASSIFIER_HEAD if allows_new_head else None,
            num_labels=1,
            dtype=dtype,
            local_files_only=is_local,
            trust_remote_code=False,
        )


def load_skeleton(path: str | Path) -> PreTrainedModel:
    """Build the causal language model of a folder or a Hugging Face id without its weights.

    Raises:
        NotFoundError: there is no model.
    """
    with _shorten_errors(path) as is_local:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=is_local, trust_remote_code=False
        )
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or a Hugging Face id as it was saved.

    For some model types, AutoTokenizer ignores the saved class. For a tiny model of type qwen2,
    which older runs created, it would split every number into digits, unlike in the warm start.

    Raises:
        NotFoundError: there is no tokenizer.
    """
    config_file = Path(path) / "tokenizer_config.json"
    if Path(path).is_dir() and not any(any(Path(path).glob(name)) for name in _TOKENIZER_FILES):
        raise NotFoundError(
            f"model.path = '{path}': there is no tokenizer; copy its files into the folder, such "
            "as tokenizer.json and tokenizer_config.json"
        )
    with _shorten_errors(path) as is_local:
        settings = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        is_fast = settings.get("tokenizer_class") == _FAST_TOKENIZER_CLASS
        loader = transformers.PreTrainedTokenizerFast if is_fast else transformers.AutoTokenizer
        return loader.from_pretrained(path, local_files_only=is_local, trust_remote_code=False)


def load_policy_tokenizer(path: str | Path, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the policy, with the chat template that the run's configuration gives.

    Checkpoints already contain that template.

    Raises:
        NotFoundError: there is no tokenizer or no template.
    """
    tokenizer = load_tokenizer(path)
    if isinstance(config, PretrainedModel) and config.chat_template and str(path) == config.path:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


def read_chat_template(path: str | Path) -> str:
    """Return the text of a file with a chat template.

    Raises:
        NotFoundError: the file cannot be read.
    """
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(
            f"model.chat_template = '{path}': the file cannot be read ({error}); expected a Jinja "
            "template in UTF-8, such as chat_template.jinja in a model's folder"
        ) from error


def load_end_token_ids(path: str | Path) -> list[int]:
    """Load the tokens at which `generate` ends an answer of a model; empty if it lists none.

    They are in generation_config.json, or in older models in config.json.

    Raises:
        NotFoundError: there is no model.
    """
    with _shorten_errors(path) as is_local:
        try:
            generation = transformers.GenerationConfig.from_pretrained(
                path, local_files_only=is_local
            )
        except OSError:
            generation = transformers.GenerationConfig()
    end_token_ids = generation.eos_token_id
    if end_token_ids is None:
        end_token_ids = getattr(load_config(path).get_text_config(), "eos_token_id", None)
    if end_token_ids is None:
        return []
    return [end_token_ids] if isinstance(end_token_ids, int) else list(end_token_ids)


def get_current_minute() -> int:
    """Return a number that changes every minute."""
    return int(time.monotonic() // 60)


@lru_cache(maxsize=1)
def is_hub_reachable(minute: int) -> bool:
    """Return whether Hugging Face responds.

    The Hugging Face client would try six times for each file, for half a minute. The result is
    cached for one `minute` (see `get_current_minute`), because the network may recover.
    """
    try:
        with urlopen(Request(hub.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return True
    except HTTPError:
        return True
    except OSError as error:
        # The client may accept a certificate that urllib does not.
        is_reachable = isinstance(getattr(error, "reason", None), ssl.SSLError)
        if not is_reachable:
            _log.warning(
                "%s does not respond (%s); loading models from the cache", hub.ENDPOINT, error
            )
        return is_reachable


def _explain_refusal(path: str | Path, error: BaseException) -> str | None:
    """Return the message for a model that Hugging Face refuses to send; None for other errors."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    login = "set HF_TOKEN to your token, or log in with `hf auth login`"
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return f"the model is gated; accept its license at {hub.ENDPOINT}/{path}, and {login}"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return (
            f"Hugging Face ({hub.ENDPOINT}) has no such model, and there is no such folder; "
            f"correct the id, or if the model is private, {login}"
        )
    return None


def _load_weights(
    auto_class: Any,
    path: str | Path,
    prepare: Prepare | None,
    optional_prefix: str | None = None,
    **arguments: Any,
) -> PreTrainedModel:
    """Load a model with one of transformers' automatic classes.

    `optional_prefix` is a prefix of the names of weights that the files need not contain.

    Raises:
        ValueError: the files do not contain all weights.
    """
    missing_names: list[str] = []

    def load(**more_arguments: Any) -> PreTrainedModel:
        model: PreTrainedModel
        model, loading_info = auto_class.from_pretrained(
            path, output_loading_info=True, **arguments, **more_arguments
        )
        missing_names.extend(
            name
            for name in sorted(loading_info["missing_keys"])
            if optional_prefix is None or not name.startswith(optional_prefix)
        )
        return model

    model = load() if prepare is None else load_prepared(load, prepare)
    if missing_names:
        raise ValueError(
            f"its files do not contain {len(missing_names)} of its weights, such as "
            f"'{missing_names[0]}'"
        )
    return model


def _describe_damage(path: str | Path, error: SafetensorError) -> str:
    """Return the reason and the remedy for files of weights that cannot be read."""
    folder, remedy = Path(path), "copy the whole folder that save_pretrained wrote"
    if not folder.is_dir():
        folder = Path(snapshot_download(str(path), local_files_only=True))
        remedy = f"remove '{folder}', so that the model is downloaded again"
    return f"{find_weight_problem(folder) or error}; {remedy}"


def _is_single_label_classifier(config: PretrainedConfig) -> bool:
    return config.num_labels == 1 and any(
        name.endswith(_CLASSIFIER_SUFFIX) for name in config.architectures or []
    )


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Suppress the long warning of transformers that a new head is untrained."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _shorten_errors(path: str | Path, field: str = "model.path") -> Iterator[bool]:
    """Yield whether to use local files only; replace loading errors by short messages."""
    is_folder = Path(path).is_absolute() or Path(path).is_dir()
    is_local = is_folder or hub.HF_HUB_OFFLINE or not is_hub_reachable(get_current_minute())
    try:
        yield is_local
    except SafetensorError as error:
        raise NotFoundError(f"{field} = '{path}': {_describe_damage(path, error)}") from error
    except (OSError, ValueError) as error:
        if is_local and not is_folder:
            reason = "is switched off (HF_HUB_OFFLINE)"
            if not hub.HF_HUB_OFFLINE:
                reason = f"does not respond within {HUB_TIMEOUT_S:g} s"
            raise NotFoundError(
                f"{field} = '{path}': there is no such folder{describe_place(path)}, Hugging Face "
                f"({hub.ENDPOINT}) {reason}, and the cache '{hub.HF_HUB_CACHE}' does not contain "
                "the whole model; correct the path, check the network, or set HF_ENDPOINT to a "
                "mirror"
            ) from error
        remedy = _explain_refusal(path, error)
        if remedy is not None:
            raise NotFoundError(f"{field} = '{path}': {remedy}") from error
        reason = str(error).strip().splitlines()[0]
        raise NotFoundError(
            f"{field} = '{path}': the model cannot be loaded ({reason}); use a folder that "
            "save_pretrained wrote, or a Hugging Face id"
        ) from error
