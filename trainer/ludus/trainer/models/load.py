"""Loading a language model and its tokenizer from disk."""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from huggingface_hub import constants as hub
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

from ludus.proto.errors import ConfigError, NotFoundError

# In the log of a job, each refresh of a bar is a line.
disable_progress_bar()

_log = logging.getLogger(__name__)

_HUB_ANSWERS_WITHIN_S = 5.0
_CLASSIFIER = "ForSequenceClassification"
_SELF_CONTAINED = "TokenizersBackend"
"""What transformers names a tokenizer whose tokenizer.json says all there is to know."""


def check_language_model(path: str | Path) -> None:
    """Check that there is a model; of one at Hugging Face, a small file is loaded.

    Raises:
        NotFoundError: there is none.
    """
    with _refusing(path) as is_local:
        AutoConfig.from_pretrained(path, local_files_only=is_local)


def load_language_model(
    path: str | Path, dtype: torch.dtype | Literal["auto"] = torch.float32
) -> PreTrainedModel:
    """The causal language model of a folder or a Hugging Face id.

    Args:
        dtype: of its weights; "auto" is that of the files.

    Raises:
        NotFoundError: there is none.
    """
    with _refusing(path) as is_local:
        return AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=is_local,
            adapter_kwargs={"local_files_only": is_local},
        )


def check_reward_model(path: str | Path, field: str = "path") -> None:
    """Check that there is a sequence classifier of one label; its weights are not read.

    Args:
        field: of the configuration, which a message names.

    Raises:
        NotFoundError: there is no model.
        ConfigError: it is another kind of model.
    """
    with _refusing(path, field) as is_local:
        config = AutoConfig.from_pretrained(path, local_files_only=is_local)
    kinds = config.architectures or []
    if not any(kind.endswith(_CLASSIFIER) for kind in kinds) or config.num_labels != 1:
        raise ConfigError(
            f"{field} = '{path}': expected a reward model, which is a sequence classifier with "
            f"num_labels = 1, got {', '.join(kinds) or 'a model of no kind'} with num_labels = "
            f"{config.num_labels}; train one with `ludus train-reward`"
        )


def is_reward_model(path: str | Path) -> bool:
    """Whether it is a sequence classifier of one label; its weights are not read.

    Raises:
        NotFoundError: there is no model.
    """
    with _refusing(path) as is_local:
        config = AutoConfig.from_pretrained(path, local_files_only=is_local)
    return config.num_labels == 1 and any(
        kind.endswith(_CLASSIFIER) for kind in config.architectures or []
    )


def load_sequence_classifier(
    path: str | Path, dtype: torch.dtype, *, begins: bool = False
) -> PreTrainedModel:
    """The sequence classifier of one label in a folder, or of a Hugging Face id.

    Args:
        dtype: of its weights.
        begins: it may be a causal language model, which gets a random head.

    Raises:
        NotFoundError: there is no model.
        ConfigError: it is another kind of model.
    """
    if not begins:
        check_reward_model(path)
    with _refusing(path, "model" if begins else "path") as is_local, _without_report():
        return AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=dtype, local_files_only=is_local
        )


def load_skeleton(path: str | Path) -> PreTrainedModel:
    """The model of a folder or a Hugging Face id without its weights, of which none is read.

    Raises:
        NotFoundError: there is none.
    """
    with _refusing(path) as is_local:
        config = AutoConfig.from_pretrained(path, local_files_only=is_local)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a Hugging Face id, as it was saved.

    For some model types AutoTokenizer takes a class of its own in place of the saved one. A tiny
    model of type qwen2, as older runs have made them, would see every number cut into digits:
    other tokens than those that it was warm-started on.

    Raises:
        NotFoundError: there is none.
    """
    file = Path(path) / "tokenizer_config.json"
    saved = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    is_self_contained = saved.get("tokenizer_class") == _SELF_CONTAINED
    loader = PreTrainedTokenizerFast if is_self_contained else AutoTokenizer
    with _refusing(path) as is_local:
        return loader.from_pretrained(path, local_files_only=is_local)


@contextmanager
def _without_report() -> Iterator[None]:
    """Keeps transformers from telling at length that a new head is new."""
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)


def _minute() -> int:
    """The minute that it is, by a number."""
    return int(time.monotonic() // 60)


@lru_cache(maxsize=1)
def _hub_answers(minute: int) -> bool:
    """Whether Hugging Face does; its own client asks six times for each file, half a minute long.

    That holds for a `minute`: the network may come back.
    """
    try:
        with urlopen(Request(hub.ENDPOINT, method="HEAD"), timeout=_HUB_ANSWERS_WITHIN_S):
            return True
    except HTTPError:
        return True
    except OSError as error:
        # The client may know the certificate.
        answers = isinstance(getattr(error, "reason", None), ssl.SSLError)
        if not answers:
            _log.warning("%s does not answer (%s): models come from the cache", hub.ENDPOINT, error)
        return answers


@contextmanager
def _refusing(path: str | Path, field: str = "model.path") -> Iterator[bool]:
    """Whether all there is lies on this machine; what cannot be loaded is said in one sentence."""
    is_path = Path(path).is_absolute() or Path(path).is_dir()
    is_local = is_path or hub.HF_HUB_OFFLINE or not _hub_answers(_minute())
    try:
        yield is_local
    except (OSError, ValueError) as error:
        if is_local and not is_path:
            why = "is switched off (HF_HUB_OFFLINE)"
            if not hub.HF_HUB_OFFLINE:
                why = f"does not answer within {_HUB_ANSWERS_WITHIN_S:g} s"
            raise NotFoundError(
                f"{field} = '{path}': Hugging Face ({hub.ENDPOINT}) {why}, and the cache "
                f"'{hub.HF_HUB_CACHE}' does not hold all of it; see the network, set HF_ENDPOINT "
                "to a mirror, or give a folder"
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise NotFoundError(
            f"{field} = '{path}': no model can be loaded from there ({reason}); expected a "
            "folder that save_pretrained wrote, or a Hugging Face id"
        ) from error
