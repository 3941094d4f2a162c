"""The configuration of a run as reports show it."""

from __future__ import annotations

from ludus.proto.config import RecordedRun, SftRun
from ludus.services import display


def remove_credentials(config: RecordedRun) -> RecordedRun:
    """Return a configuration without the credentials in addresses of servers."""
    if isinstance(config, SftRun):
        return config
    environments = dict(config.environments)
    for name, environment in environments.items():
        if environment.kind == "remote":
            address = display.describe_environment(environment)
            environments[name] = environment.model_copy(update={"address": address})
    return config.model_copy(update={"environments": environments})
