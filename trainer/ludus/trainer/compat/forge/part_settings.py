"""Settings of a part: sections of Forge's configuration, converted to a run of Ludus."""

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
from ludus.trainer.compat.forge.mapping import LUDUS_SECTION, run_tree
from ludus.trainer.compat.forge.values import check_value

_log = logging.getLogger(__name__)

_LOOP_FIELDS = {"training": ("local_batch_size", "global_batch_size"), "sampling_params": ("n",)}
"""Fields by section that the loop around the parts determines."""


def make_part_settings(
    section: str, fields: Mapping[str, Any], *, max_tokens: int | None, engine: str | None = None
) -> LanguageModelRun:
    """Convert the fields of a section of Forge's file to a run configuration.

    Args:
        max_tokens: the maximum length of a sequence.
        engine: the value of generator.kind; None chooses it for this machine.

    Raises:
        ConfigError: a field does not exist in Forge or is not supported.
    """
    tree: dict[str, Any] = {
        "max_seq_len": max_tokens,
        section: {name: _drop_loop_fields(name, value) for name, value in fields.items()},
        LUDUS_SECTION: {"environment": {"kind": "local"}},
    }
    if engine is not None:
        tree[LUDUS_SECTION]["generator"] = {"kind": engine}
    for name, value in fields.items():
        for field, item in value.items() if isinstance(value, Mapping) else ():
            check_value(f"{section}.{name}.{field}", item, source_key=f"{name}.{field}")
    mapped_tree = run_tree(ForgeConfig(tree), name=section, has_gpu=torch.cuda.is_available())
    if mapped_tree.unused:
        _log.warning("these fields have no effect: %s", ", ".join(mapped_tree.unused))
    run = run_config_from(mapped_tree.tree, source=f"section {section}")
    return require_language_model(run, "a part of Forge")


def part_model_path(run: LanguageModelRun) -> str:
    """Return the folder or Hugging Face id of the part's model.

    Raises:
        ConfigError: the part has no model.
    """
    if not isinstance(run.model, PretrainedModel):
        raise ConfigError(
            "a model is required, as a Hugging Face id or a folder that save_pretrained wrote; set "
            "engine_args.model or model.hf_assets_path"
        )
    return run.model.path


def _drop_loop_fields(name: str, value: Any) -> Any:
    if name not in _LOOP_FIELDS or not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if key not in _LOOP_FIELDS[name]}
