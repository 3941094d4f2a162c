"""Metrics for Weights & Biases: sent while the run continues, or kept in its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.env.types import JsonObject
from ludus.proto.config import RunConfig, WandbSink
from ludus.proto.errors import ConfigError
from ludus.proto.runs import MetricsRow
from ludus.trainer.run.sinks.names import tagged_values

if TYPE_CHECKING:
    import wandb

_KEY_VARIABLE = "WANDB_API_KEY"
_TIMEOUT_S = 60.0
"""For a service that does not answer: when a run begins, and when it ends."""
_STEP, _GAMES, _ELAPSED = "step", "num_games_trained", "elapsed_s"


class WandbWriter:
    """One run of a project; a resumed run continues under its id."""

    name = "wandb"

    def __init__(self, session: wandb.Run) -> None:
        self._session = session

    @classmethod
    def start(cls, run: RunConfig, config: WandbSink, folder: Path) -> WandbWriter:
        """The sink, which has written the run's configuration.

        Raises:
            ConfigError: the package or the key is missing, or the service refuses.
        """
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "metrics.wandb is set, but the package wandb is not installed; "
                "install it with `pip install wandb`, or remove the section"
            ) from error
        if config.mode == "online" and not os.environ.get(_KEY_VARIABLE):
            raise ConfigError(
                f"metrics.wandb.mode = 'online' expected a key in {_KEY_VARIABLE}, which is not "
                "set; set it, or take mode = 'offline' and send the run later with `wandb sync`"
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            session = wandb.init(
                project=config.project,
                entity=config.entity,
                name=run.name,
                id=_identity(run, folder),
                resume="allow",
                mode=config.mode,
                dir=folder.parent,
                config=run.model_dump(mode="json"),
                settings=wandb.Settings(
                    silent=True,
                    init_timeout=_TIMEOUT_S,
                    # What is not sent by then is in the folder, for `wandb sync`.
                    finish_timeout=_TIMEOUT_S,
                    finish_timeout_raises=True,
                    console="off",
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                    x_save_requirements=False,
                    x_disable_meta=True,
                ),
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"metrics.wandb: the run cannot be opened: {reason}; see {_KEY_VARIABLE}, project "
                f"'{config.project}' and the network, or take mode = 'offline'"
            ) from error
        # A resumed run repeats steps; W&B's own counter would drop them.
        session.define_metric(_STEP)
        session.define_metric("*", step_metric=_STEP)
        return cls(session)

    def write(self, row: MetricsRow) -> None:
        """Send the row's values."""
        tagged = tagged_values(row)
        if tagged:
            self._session.log(
                {
                    **tagged,
                    _STEP: row.step,
                    _GAMES: row.num_games_trained,
                    _ELAPSED: row.elapsed_s,
                }
            )

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Do nothing: rows name their environment."""

    def rewind(self, step: int) -> None:
        """Do nothing: what follows stands beside what there is, by its step."""

    def close(self) -> None:
        """Send what was written, or leave it in the folder."""
        self._session.finish()


def _identity(run: RunConfig, folder: Path) -> str:
    """The id of this run, the same after a resume; it stands in a file of the folder."""
    path = folder / "run-id"
    if not path.exists():
        path.write_text(f"{run.name}-{os.urandom(4).hex()}", encoding="utf-8")
    return path.read_text(encoding="utf-8")
