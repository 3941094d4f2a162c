"""A picture as rows of digits: how a language model without eyes may see one."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from ludus.env.adapters.gymnasium.spaces import AnySpace
from ludus.proto.errors import ConfigError

_NUM_SHADES = 10


def require_picture(space: AnySpace, num_columns: int) -> None:
    """Refuse a space whose elements are no pictures, or narrower than that.

    Raises:
        ConfigError: it is such a one.
    """
    is_picture = isinstance(space, spaces.Box) and space.dtype == np.uint8
    shape = space.shape or ()
    if not is_picture or len(shape) not in (2, 3) or shape[2:] not in ((), (1,), (3,)):
        raise ConfigError(
            "expected picture_columns with pictures of height x width, grey or in three colours,"
            f" got observations in {space}; leave it out"
        )
    if type(num_columns) is not int or not 1 <= num_columns <= shape[1]:
        raise ConfigError(
            f"expected picture_columns from 1 to the picture's {shape[1]}, got {num_columns!r}"
        )


def picture_rows(picture: np.ndarray, num_columns: int) -> str:
    """The picture in so many columns, and rows to match.

    Each digit is the mean brightness of its part, from 0, black, to 9, white.
    """
    grey = picture if picture.ndim == 2 else picture.mean(axis=2)
    num_rows = max(1, round(num_columns * grey.shape[0] / grey.shape[1]))
    tops = np.arange(num_rows) * grey.shape[0] // num_rows
    lefts = np.arange(num_columns) * grey.shape[1] // num_columns
    sums = np.add.reduceat(np.add.reduceat(grey.astype(np.float64), tops, 0), lefts, 1)
    heights = np.diff(np.append(tops, grey.shape[0]))
    widths = np.diff(np.append(lefts, grey.shape[1]))
    shades = (sums / np.outer(heights, widths) * _NUM_SHADES / 256).astype(int)
    return "\n".join("".join(map(str, row)) for row in shades)
