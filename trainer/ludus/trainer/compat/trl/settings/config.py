"""TRL's GRPOConfig; a run applies each of its fields, or refuses it by name."""

from __future__ import annotations

import sys
from typing import Any

from ludus.proto.errors import ConfigError, did_you_mean
from ludus.trainer.compat.trl.settings.fields import DEFAULTS, IGNORED, REFUSED
from ludus.trainer.compat.trl.settings.values import check_value


class GRPOConfig:
    """The settings of a TRL script, with the names and defaults of TRL 1.16.

    Fields can be read and set as in TRL. `run_settings` converts them into the configuration of a
    run; docs/from-trl.md contains the table.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        """Set the fields; a field that has no effect here is reported on stderr.

        Raises:
            ConfigError: TRL has no such field, or its value is not supported.
        """
        self.__dict__.update(DEFAULTS)
        self.output_dir = output_dir
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in DEFAULTS:
            hint = did_you_mean(name, DEFAULTS) or "see docs/from-trl.md"
            raise ConfigError(f"GRPOConfig has no field '{name}' in TRL 1.16; {hint}")
        _refuse(name, value)
        check_value(name, value)
        if name in IGNORED and value != IGNORED[name][0]:
            sys.stderr.write(f"note: GRPOConfig.{name} has no effect here: {IGNORED[name][1]}\n")
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GRPOConfig has no field '{name}' in TRL 1.16")

    def __repr__(self) -> str:
        fields = {k: v for k, v in self.__dict__.items() if k not in DEFAULTS or DEFAULTS[k] != v}
        return f"GRPOConfig({', '.join(f'{k}={v!r}' for k, v in fields.items())})"


def _refuse(name: str, value: Any) -> None:
    if name == "optim" and str(value) in ("adamw_torch", "adamw_torch_fused"):
        return
    if name in REFUSED and value != REFUSED[name][0] and value not in (None, "", {}, []):
        raise ConfigError(
            f"GRPOConfig.{name} = {value!r:.100} is not supported, expected "
            f"{REFUSED[name][0]!r}; {REFUSED[name][1]}"
        )
