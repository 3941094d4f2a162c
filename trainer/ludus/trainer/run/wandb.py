"""The sink for Weights & Biases: values are sent at once, or stored in the run's folder."""

from __future__ import annotations

import os
from pathlib import Path

from ludus.proto.config import RecordedRun, WandbSink
from ludus.proto.errors import ConfigError
from ludus.proto.runs import MetricsRow
from ludus.trainer.run.sinks import MetricsSink, tag_values

_KEY_VARIABLE = "WANDB_API_KEY"
_TIMEOUT_S = 60.0
"""Time limit for the service to respond, when a run starts and when it stops."""
_STEP_KEY, _GAMES_KEY, _ELAPSED_KEY = "step", "num_games_trained", "elapsed_s"


def check_key(config: WandbSink) -> None:
    """Check that there is a key if the sink needs one.

    Raises:
        ConfigError: there is none.
    """
    if config.mode == "online" and not os.environ.get(_KEY_VARIABLE):
        raise ConfigError(
            f"metrics.wandb.mode = 'online' needs a key in {_KEY_VARIABLE}, which is not set; "
            "set it, or use mode = 'offline' and send the run later with `wandb sync`"
        )


class WandbWriter(MetricsSink):
    """A sink that logs to a run of a Weights & Biases project; a resumed run keeps its id.

    If a run is rewound and repeats steps, Weights & Biases shows both values of a step.
    """

    name = "wandb"

    def __init__(self, run: RecordedRun, config: WandbSink, folder: Path) -> None:
        """Open the sink and write the run's configuration."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "metrics.wandb is set, but the package wandb is not installed; "
                "install it with `pip install wandb`, or remove the section"
            ) from error
        check_key(config)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._session = wandb.init(
                project=config.project,
                entity=config.entity,
                name=run.name,
                id=_ensure_wandb_id(run, folder),
                resume="allow",
                mode=config.mode,
                dir=folder.parent,
                config=run.model_dump(mode="json"),
                settings=wandb.Settings(
                    silent=True,
                    init_timeout=_TIMEOUT_S,
                    # Values that are not sent by then stay in the folder, for `wandb sync`.
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
                f"metrics.wandb: the run cannot be opened: {reason}; check {_KEY_VARIABLE}, "
                f"project '{config.project}' and the network, or use mode = 'offline'"
            ) from error
        # A resumed run repeats steps, which W&B's default counter would drop.
        self._session.define_metric(_STEP_KEY)
        self._session.define_metric("*", step_metric=_STEP_KEY)

    def write(self, row: MetricsRow) -> None:
        """Send the row's values."""
        values = dict(tag_values(row))
        if values:
            values[_STEP_KEY] = row.step
            values[_GAMES_KEY] = row.num_games_trained
            values[_ELAPSED_KEY] = row.elapsed_s
            self._session.log(values)

    def close(self) -> None:
        """Send pending values, or keep them in the folder."""
        self._session.finish()


def _ensure_wandb_id(run: RecordedRun, folder: Path) -> str:
    """Return the id of this run from a file in the folder, which a resumed run reuses."""
    path = folder / "run-id"
    if not path.exists():
        path.write_text(f"{run.name}-{os.urandom(4).hex()}", encoding="utf-8")
    return path.read_text(encoding="utf-8")
