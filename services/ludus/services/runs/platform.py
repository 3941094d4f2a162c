"""What an installed release offers to runs: its environments, its volume, its RayJob.

The chart writes it into a ConfigMap with the label ludus.dev/runs, under two keys: rayjob.yaml,
a whole RayJob but for the run's name, and platform.json, what this file reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.names import PLATFORM_KEY, RUNS_LABEL, TEMPLATE_KEY


class _Part(BaseModel):
    # A newer chart may say more than this program knows.
    model_config = ConfigDict(extra="ignore", frozen=True)


class PlatformEnvironment(_Part):
    """An environment that the release's gateway serves."""

    address: str
    """As clients in the cluster address it, for example grpc://ludus-gateway:18000/blackjack."""
    package: str | None = None
    """What its servers were started with; null where the release does not say it."""
    options: dict[str, Any] | None = None


class FolderWeights(_Part):
    """Weights travel through the volume."""

    kind: Literal["folder"] = "folder"


class S3Weights(_Part):
    """Weights travel through a bucket, whose credentials the pods have."""

    kind: Literal["s3"] = "s3"
    bucket: str
    endpoint: str | None = None
    prefix: str = "ludus"
    region: str = "us-east-1"


class PodGroup(_Part):
    """Pods of one kind."""

    per_pod: Annotated[int, Field(ge=1)] = 1
    """Learner ranks or rollout workers that fit into one."""


class Platform(_Part):
    """What the release says of itself."""

    release: str
    namespace: str
    environments: dict[str, PlatformEnvironment] = {}
    output_dir: str = "/runs"
    weights: Annotated[FolderWeights | S3Weights, Field(discriminator="kind")] = FolderWeights()
    learner: PodGroup = PodGroup()
    rollout: PodGroup = PodGroup()
    metrics_port: int | None = None
    """Port of the driver's pod at which the release's monitors ask for metrics."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release, and the RayJob that its runs are made from."""

    platform: Platform
    template: JsonObject


def release_of(config_map: JsonObject) -> Release:
    """The release that a ConfigMap describes.

    Raises:
        ConfigError: it does not.
    """
    name = (config_map.get("metadata") or {}).get("name", "")
    data = config_map.get("data") or {}
    missing = [key for key in (TEMPLATE_KEY, PLATFORM_KEY) if key not in data]
    if missing:
        raise _unusable(name, f"no key {missing[0]}")
    try:
        platform = Platform.model_validate_json(data[PLATFORM_KEY])
        template = yaml.load(data[TEMPLATE_KEY], yaml.CSafeLoader)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _unusable(name, f"{PLATFORM_KEY}: {place}: {first['msg']}") from None
    except yaml.YAMLError as error:
        raise _unusable(name, f"{TEMPLATE_KEY}: {error}") from None
    if not isinstance(template, dict) or template.get("kind") != "RayJob":
        raise _unusable(name, f"{TEMPLATE_KEY} without a RayJob")
    return Release(platform, template)


def _unusable(name: str, found: str) -> ConfigError:
    return ConfigError(
        f"expected ConfigMap '{name}' to say how runs are made, got {found}; upgrade the release "
        "with the chart of this version of Ludus"
    )


def chosen_release(config_maps: Sequence[JsonObject], wanted: str | None, where: str) -> Release:
    """The release with the wanted name, or the only one.

    Args:
        where: the place that was searched, for people.

    Raises:
        NotFoundError: there is none, or none of that name.
        ConfigError: there are several, and none is wanted by name.
    """
    releases = {(one := release_of(config_map)).platform.release: one for config_map in config_maps}
    names = ", ".join(sorted(releases))
    if not releases:
        raise NotFoundError(
            f"no release of Ludus was found in {where}; install one with `helm install ludus "
            "charts/ludus`, or name another namespace with --namespace"
        )
    if wanted is not None and wanted not in releases:
        hint = did_you_mean(wanted, releases) or f"there: {names}"
        raise NotFoundError(f"no release '{wanted}' was found in {where}; {hint}")
    if wanted is None and len(releases) > 1:
        raise ConfigError(f"expected one release in {where}, got {names}; choose with --release")
    return releases[wanted] if wanted is not None else next(iter(releases.values()))


def release_in_file(path: Path, wanted: str | None) -> Release:
    """The release in a file of manifests, as `helm template` writes it.

    Raises:
        NotFoundError: there is none.
        ConfigError: the file cannot be read.
    """
    try:
        documents = list(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from None
    found = [one for one in documents if isinstance(one, dict) and _is_about_runs(one)]
    return chosen_release(found, wanted, f"'{path}'")


def _is_about_runs(document: JsonObject) -> bool:
    labels = (document.get("metadata") or {}).get("labels") or {}
    return document.get("kind") == "ConfigMap" and labels.get(RUNS_LABEL) == "true"
