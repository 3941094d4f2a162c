"""TRL's GRPOConfig by its fields, each of which a run honours, or refuses by name."""

from __future__ import annotations

import sys
from typing import Any

from ludus.proto.errors import ConfigError, did_you_mean
from ludus.trainer.compat.trl.settings.fields import DEFAULTS, REFUSED, TOLD
from ludus.trainer.compat.trl.settings.values import check_value


class GRPOConfig:
    """What a script of TRL's sets, under TRL's names and with TRL's defaults (version 1.16).

    Fields may be read and set as there. What a run makes of them is `run_settings`; the table is in
    docs/from-trl.md.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        """Take the fields; one that nothing here depends on is said, to stderr, when it is set.

        Raises:
            ConfigError: TRL has no such field, or it asks for something that no run does.
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
        if name in TOLD and value != TOLD[name][0]:
            sys.stderr.write(f"note: GRPOConfig.{name} changes nothing here: {TOLD[name][1]}\n")
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GRPOConfig has no field '{name}' in TRL 1.16")

    def __repr__(self) -> str:
        changed = {k: v for k, v in self.__dict__.items() if k not in DEFAULTS or DEFAULTS[k] != v}
        return f"GRPOConfig({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


def _refuse(name: str, value: Any) -> None:
    if name == "optim" and str(value) in ("adamw_torch", "adamw_torch_fused"):
        return
    if name in REFUSED and value != REFUSED[name][0] and value not in (None, "", {}, []):
        raise ConfigError(
            f"GRPOConfig.{name} = {value!r:.100} is not honoured here, expected "
            f"{REFUSED[name][0]!r}; {REFUSED[name][1]}"
        )
