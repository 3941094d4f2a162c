"""Reading of a model's weights in shards, so that no rank holds the whole model.

    transformers:  class and config --> model without data --> weights of the files --> model
                                             |      ^
                                         `prepare` shards it

transformers reads only this rank's rows of each sharded parameter, fuses experts if the model needs
it, and fills buffers that no file contains.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    WeightConverter,
)
from transformers.distributed import DistributedConfig

_log = logging.getLogger(__name__)

Prepare = Callable[[PreTrainedModel], object]
"""A function that changes a model in place, for example shards it."""


def load_prepared(load: Callable[..., PreTrainedModel], prepare: Prepare) -> PreTrainedModel:
    """Return the model of `load`, after `prepare` was called with it.

    `prepare` gets the model while its parameters are on the meta device. Parameters that `prepare`
    adds with data keep this data. If the rows of a parameter are not rows of the files, each rank
    reads the whole model first.

    Args:
        load: function that passes its keyword arguments to `from_pretrained`.
    """
    is_prepared = False

    def prepare_without_data(model: PreTrainedModel) -> None:
        nonlocal is_prepared
        if _needs_whole_model(model):
            _log.warning(
                "the weights of %s are converted when they are read, so each learner rank holds "
                "the whole model until it is sharded",
                type(model).__name__,
            )
        else:
            prepare(model)
            is_prepared = True

    with _call_before_reading(prepare_without_data) as arguments, warnings.catch_warnings():
        # transformers draws weights that no file contains; the caller refuses them afterwards.
        warnings.filterwarnings("ignore", message="DTensor random operators")
        model = load(**arguments)
    if not is_prepared:
        prepare(model)
    return model


@contextmanager
def _call_before_reading(function: Prepare) -> Iterator[dict[str, Any]]:
    """Call `function` with the model that `from_pretrained` builds in this context.

    Yields the arguments for `from_pretrained`. They request no parallelism, but make transformers
    call its hook for parallel models, which this context replaces. Only one model may be loaded in
    a process at a time.
    """
    handles = []

    def distribute(_: type[PreTrainedModel], model: PreTrainedModel, *__: Any) -> PreTrainedModel:
        function(model)
        for parameter in model.parameters():
            if parameter.device.type != "meta":
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        handles.append(model.register_state_dict_post_hook(_remove_entries_with_data))
        return model

    PreTrainedModel.maybe_distribute_model = classmethod(distribute)
    try:
        yield {"distributed_config": DistributedConfig()}
    finally:
        # Uncover the original, which a base class defines.
        del PreTrainedModel.maybe_distribute_model
        for handle in handles:
            handle.remove()


def _remove_entries_with_data(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """Hide parameters with data from transformers, which would look for them in the files."""
    for name in [name for name, tensor in state.items() if tensor.device.type != "meta"]:
        del state[name]


def _needs_whole_model(model: PreTrainedModel) -> bool:
    """Return whether transformers cannot read a rank's rows of a parameter alone."""
    return any(
        isinstance(conversion, WeightConverter)
        and (
            not all(map(_keeps_rows, conversion.operations))
            or _leaves_rank_without_rows(model, conversion)
        )
        for conversion in get_model_conversion_mapping(model)
    )


def _leaves_rank_without_rows(model: PreTrainedModel, conversion: WeightConverter) -> bool:
    """Return whether a rank has no rows of a converted parameter, such as no expert of a layer.

    transformers cannot convert an empty list of tensors.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return any(
        math.ceil(len(parameter) / num_ranks) * (num_ranks - 1) >= len(parameter)
        for name, parameter in model.named_parameters()
        if any(pattern in name for pattern in conversion.target_patterns)
    )


def _keeps_rows(operation: ConversionOps) -> bool:
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, (Chunk, Concatenate, Interleave)) and operation.dim > 0
