"""Pictures as rows of digits, for language models without vision."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from ludus.env.adapters.gymnasium.spaces import AnySpace
from ludus.proto.errors import ConfigError

_NUM_SHADES = 10


def require_picture(space: AnySpace, num_columns: int) -> None:
    """Check that a space consists of pictures with at least `num_columns` columns.

    Raises:
        ConfigError: its elements are not pictures, or they are narrower.
    """
    is_picture = isinstance(space, spaces.Box) and space.dtype == np.uint8
    shape = space.shape or ()
    if not is_picture or len(shape) not in (2, 3) or shape[2:] not in ((), (1,), (3,)):
        raise ConfigError(
            "picture_columns needs pictures of height x width, gray or with three colors,"
            f" got observations in {space}; remove it"
        )
    if type(num_columns) is not int or not 1 <= num_columns <= shape[1]:
        raise ConfigError(
            f"picture_columns must be 1 to {shape[1]}, the picture's width, got {num_columns!r}"
        )


def picture_rows(picture: np.ndarray, num_columns: int) -> str:
    """Draw a picture with `num_columns` columns and a proportional number of rows.

    Each digit is the mean brightness of its part, from 0 (black) to 9 (white).
    """
    gray = picture if picture.ndim == 2 else picture.mean(axis=2)
    num_rows = max(1, round(num_columns * gray.shape[0] / gray.shape[1]))
    tops = np.arange(num_rows) * gray.shape[0] // num_rows
    lefts = np.arange(num_columns) * gray.shape[1] // num_columns
    sums = np.add.reduceat(np.add.reduceat(gray.astype(np.float64), tops, 0), lefts, 1)
    heights = np.diff(np.append(tops, gray.shape[0]))
    widths = np.diff(np.append(lefts, gray.shape[1]))
    shades = (sums / np.outer(heights, widths) * _NUM_SHADES / 256).astype(int)
    return "\n".join("".join(map(str, row)) for row in shades)
