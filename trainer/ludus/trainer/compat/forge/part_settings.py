"""What a part is made from: sections of Forge's configuration, as a run of Ludus has them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ludus.proto.config import (
    LanguageModelRun,
    PretrainedModel,
    require_language_model,
    run_config_from,
)
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.configuration import ForgeConfig
from ludus.trainer.compat.forge.mapping import OWN_SECTION, run_tree
from ludus.trainer.compat.forge.values import checked

_log = logging.getLogger(__name__)

_OF_THE_LOOP = {"training": ("local_batch_size", "global_batch_size"), "sampling_params": ("n",)}
"""By section, what the loop around the parts decides."""


def settings_of(
    section: str, fields: Mapping[str, Any], *, longest: int | None, engine: str | None = None
) -> LanguageModelRun:
    """The run that the fields of a section of Forge's file belong to.

    Args:
        longest: tokens of a sequence.
        engine: generator.kind, where the machine is not to decide it.

    Raises:
        ConfigError: fields that Forge does not have, or that mean what nothing here does.
    """
    tree: dict[str, Any] = {
        "max_seq_len": longest,
        section: {name: _without_the_loop(name, value) for name, value in fields.items()},
        OWN_SECTION: {"environment": {"kind": "local"}},
    }
    if engine is not None:
        tree[OWN_SECTION]["generator"] = {"kind": engine}
    for name, value in fields.items():
        for field, one in value.items() if isinstance(value, Mapping) else ():
            checked(f"{section}.{name}.{field}", one, typed=f"{name}.{field}")
    mapped = run_tree(ForgeConfig(tree), name=section, has_gpu=torch.cuda.is_available())
    if mapped.unused:
        _log.warning("not honoured: %s", ", ".join(mapped.unused))
    run = run_config_from(mapped.tree, source=f"section {section}")
    return require_language_model(run, "a part of Forge")


def path_of_model(run: LanguageModelRun) -> str:
    """The folder or Hugging Face id of the part's model.

    Raises:
        ConfigError: none is named.
    """
    if not isinstance(run.model, PretrainedModel):
        raise ConfigError(
            "expected the name of a model, as a Hugging Face id or a folder that save_pretrained "
            "wrote, got none; set engine_args.model, or model.hf_assets_path"
        )
    return run.model.path


def _without_the_loop(name: str, value: Any) -> Any:
    if name not in _OF_THE_LOOP or not isinstance(value, Mapping):
        return value
    return {key: one for key, one in value.items() if key not in _OF_THE_LOOP[name]}
