"""Schemas of arrays in the state of a run, which is written to files as JSON."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike
from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from ludus.trainer.core.ragged import RaggedArray


def make_list_schema(dtype: DTypeLike) -> GetPydanticSchema:
    """Return the schema of an array that is written to files as a list of numbers."""
    return GetPydanticSchema(
        lambda *_: core_schema.no_info_plain_validator_function(
            lambda values: np.asarray(values, dtype=dtype),
            serialization=core_schema.plain_serializer_function_ser_schema(np.ndarray.tolist),
        )
    )


ROWS_SCHEMA = GetPydanticSchema(
    lambda *_: core_schema.nullable_schema(
        core_schema.no_info_plain_validator_function(
            lambda rows: RaggedArray.from_rows(rows, np.int32),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda array: [row.tolist() for row in array]
            ),
        )
    )
)
"""Schema of a RaggedArray or None. The array is written to files as a list of lists of numbers."""
