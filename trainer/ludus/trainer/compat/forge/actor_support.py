"""Shared code of the actors: their settings, their padding and their exchange of weights.

RLTrainer.push_weights(v) --checksums, canary--> files --verify--> Generator.update_weights(v)
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludus.proto.config import (
    FolderWeightStore,
    LanguageModelRun,
    PretrainedModel,
    make_run_config,
    require_language_model,
)
from ludus.proto.errors import ConfigError, WeightSyncError
from ludus.trainer.compat.checks import rename_in_errors
from ludus.trainer.compat.forge.configuration import LUDUS_SECTION, ForgeConfig
from ludus.trainer.compat.forge.keys import check_key
from ludus.trainer.compat.forge.mapping import map_config
from ludus.trainer.core.interfaces import FetchedWeights, PublishedWeights, StateDict
from ludus.trainer.core.types import WeightManifest
from ludus.trainer.weights.folder import FolderStorage
from ludus.trainer.weights.store import VersionStore

_log = logging.getLogger(__name__)

_LOOP_FIELDS = ("local_batch_size", "global_batch_size", "n")
"""Fields that the loop around the actors determines."""


def make_actor_settings(
    section: str, fields: Mapping[str, Any], *, max_tokens: int | None, engine: str | None = None
) -> tuple[LanguageModelRun, str]:
    """Return the run for a section of Forge's file, and its model's folder or Hugging Face id.

    Args:
        fields: fields of the actor; a field that is a mapping is a subsection.
        max_tokens: the maximum length of a sequence.
        engine: value of generator.kind; None chooses an engine for this machine.
    """
    sections = {name: dict(value) for name, value in fields.items() if isinstance(value, Mapping)}
    for name, values in sections.items():
        for field, value in values.items():
            check_key(f"{section}.{name}.{field}", value, source_key=f"{name}.{field}")
        for field in _LOOP_FIELDS:
            values.pop(field, None)
    ludus_section: dict[str, Any] = {"environment": {"kind": "local"}}
    if engine is not None:
        ludus_section["generator"] = {"kind": engine}
    config = ForgeConfig(
        {"max_seq_len": max_tokens, section: sections, LUDUS_SECTION: ludus_section}
    )
    has_gpu = torch.cuda.is_available()
    mapped_config = map_config(config, name=section, has_gpu=has_gpu)
    if mapped_config.unused_keys:
        _log.warning("these fields have no effect: %s", ", ".join(mapped_config.unused_keys))
    with rename_in_errors(mapped_config.key_by_setting):
        run = make_run_config(mapped_config.sections, source=f"section {section}")
    run = require_language_model(run, "an actor of Forge")
    if not isinstance(run.model, PretrainedModel):
        raise ConfigError(
            "a model is required, as a Hugging Face id or a folder that save_pretrained wrote; set "
            "engine_args.model or model.hf_assets_path"
        )
    # The actors are objects in this process, which uses its GPU without a reservation.
    learner = run.learner.model_copy(update={"num_gpus_per_rank": float(has_gpu)})
    return run.model_copy(update={"learner": learner}), run.model.path


def mask_left_padding(token_ids: Tensor, pad_id: int | None) -> tuple[Tensor, Tensor]:
    """Return the attention mask and the position ids, int64 [B, S], for `token_ids` [B, S].

    The mask is 0 for padding on the left, after which positions start at 0. Padding on the right
    needs no mask in a causal model.
    """
    is_padding = token_ids == (-1 if pad_id is None else pad_id)
    num_padding = is_padding.long().cumprod(1).sum(1, keepdim=True)
    indices = torch.arange(token_ids.shape[1], device=token_ids.device)
    return (indices >= num_padding).long(), (indices - num_padding).clamp(min=0)


class WeightExchange:
    """The latest versions of pushed weights, stored like those of a run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ludus-weights-")
        self._config = FolderWeightStore(path=self._folder.name)
        self._store = VersionStore(FolderStorage(Path(self._folder.name)), self._config)
        self._published: dict[int, PublishedWeights] = {}

    def push(self, manifest: WeightManifest, state: StateDict) -> None:
        """Publish a version; a few earlier versions are kept."""
        # A second training in this process starts with small version numbers again.
        self._published.pop(manifest.version, None)
        self._published[manifest.version] = self._store.publish(manifest, state)
        for version in list(self._published)[: -self._config.keep_versions]:
            del self._published[version]

    def pull(self, version: int) -> tuple[WeightManifest, FetchedWeights]:
        """Return a version after verifying its checksums.

        Raises:
            WeightSyncError: the version was never pushed or is no longer kept.
        """
        published_weights = self._published.get(version)
        if published_weights is None:
            raise WeightSyncError(
                f"weights version {version} is not available; available versions: "
                f"{sorted(self._published)}; call push_weights with it first"
            )
        return published_weights.manifest, self._store.fetch(published_weights)


@functools.cache
def get_weight_exchange() -> WeightExchange:
    """Return the weight exchange of this process, whose files are deleted at exit."""
    return WeightExchange()
