"""The number of parameters of a language model, without reading its weights."""

from __future__ import annotations

from ludus.proto.config import PretrainedModel
from ludus.proto.runs import ModelSize
from ludus.trainer.setup.memory.shape import measure_shape


def measure_model(model: PretrainedModel) -> ModelSize:
    """Return the number of parameters of a model, and how many of them training changes.

    Raises:
        NotFoundError: there is no model.
    """
    shape = measure_shape(model)
    return ModelSize(num_parameters=shape.num_parameters, num_trained=shape.num_trained)
