"""Types of arguments that Gymformer's functions share, and checks of paths and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, InstanceOf
from torch import nn

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.checks import PathText, check_value

Network = Annotated[InstanceOf[nn.Module], Field(description="a torch module")]


def require_folder(name: str, value: Any) -> Path:
    """Return the path of a folder that exists or can be created."""
    folder = Path(check_value(name, PathText, value))
    ancestors = (folder, *folder.absolute().parents)
    nearest = next((path for path in ancestors if path.exists()), folder)
    if nearest.exists() and not nearest.is_dir():
        raise ConfigError(f"{name} = '{folder}' must be a folder, but '{nearest}' is a file")
    return folder


def require_device(value: Any) -> str | None:
    """Return the name of a torch device of this machine; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (str, torch.device)):
        raise ConfigError(f"device = {value!r:.80} must be None or a string such as 'cpu'")
    try:
        torch.empty(0, device=value)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device = '{value}' cannot be used: {str(error).splitlines()[0]:.200}; use 'cpu' "
            f"or a GPU of this machine ({torch.cuda.device_count()} available)"
        ) from None
    return str(value)
