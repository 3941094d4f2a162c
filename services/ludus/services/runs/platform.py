"""The description of an installed release: its environments, volume and RayJob template.

The chart writes a ConfigMap with the label ludus.dev/runs and these keys: rayjob.yaml, a RayJob
without the run's name; networkpolicy.yaml, a NetworkPolicy without it, if the release restricts its
network; and platform.json, which this module reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.proto.config import FolderWeightStore, S3WeightStore
from ludus.proto.documents import DocumentError, parse_yaml, parse_yaml_documents
from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.names import PLATFORM_KEY, POLICY_KEY, RUNS_LABEL, TEMPLATE_KEY


class _PlatformModel(BaseModel):
    # Unknown fields are ignored, because a newer chart may add some.
    model_config = ConfigDict(extra="ignore", frozen=True)


class PlatformEnvironment(_PlatformModel):
    """An environment that the release's gateway serves."""

    address: str
    """Address for clients in the cluster, for example grpc://ludus-gateway:18000/blackjack."""
    package: str | None = None
    """Package of the environment; None if the release does not report it."""
    options: dict[str, Any] | None = None


class PodGroup(_PlatformModel):
    """The pods of learner ranks or of rollout workers."""

    per_pod: Annotated[int, Field(ge=1)] = 1
    """Number of learner ranks or rollout workers per pod."""


class Platform(_PlatformModel):
    """The content of platform.json, in which a release describes itself."""

    release: str
    namespace: str
    environments: dict[str, PlatformEnvironment] = {}
    output_dir: str = "/runs"
    weights: Annotated[FolderWeightStore | S3WeightStore, Field(discriminator="kind")] = (
        FolderWeightStore()
    )
    learner: PodGroup = PodGroup()
    rollout: PodGroup = PodGroup()
    metrics_port: int | None = None
    """Port for metrics in the driver's pod, which the release's monitors scrape."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release and the RayJob template of its runs."""

    platform: Platform
    template: JsonObject
    policy_template: JsonObject | None = None
    """Template of the NetworkPolicy of a run; None if the release does not restrict its network."""


def parse_release(config_map: JsonObject) -> Release:
    """Parse a ConfigMap that describes a release.

    Raises:
        ConfigError: the ConfigMap is incomplete or invalid.
    """
    contents = config_map.get("data") or {}
    try:
        template_yaml, platform_json = contents[TEMPLATE_KEY], contents[PLATFORM_KEY]
        platform = Platform.model_validate_json(platform_json)
        template = parse_yaml(template_yaml)
        policy_template = parse_yaml(contents.get(POLICY_KEY) or "null")
        if isinstance(template, dict) and template.get("kind") == "RayJob":
            return Release(platform, template, policy_template)
        problem = f"{TEMPLATE_KEY} is not a RayJob"
    except KeyError as error:
        problem = f"it has no key {error.args[0]}"
    except ValidationError as error:
        first_error = error.errors()[0]
        field = ".".join(map(str, first_error["loc"]))
        problem = f"{PLATFORM_KEY}: {field}: {first_error['msg']}"
    except DocumentError as error:
        problem = f"{TEMPLATE_KEY}: {error}"
    name = (config_map.get("metadata") or {}).get("name", "")
    raise ConfigError(
        f"ConfigMap '{name}' does not describe a release: {problem}; upgrade the release with the "
        "chart of this version of Ludus"
    )


def choose_release(config_maps: Sequence[JsonObject], name: str | None, source: str) -> Release:
    """Return the release with this name, or the only release.

    Args:
        source: description of where the ConfigMaps come from, for messages.

    Raises:
        NotFoundError: there is no release, or no release with this name.
        ConfigError: no name was given, and there are several releases.
    """
    releases = {release.platform.release: release for release in map(parse_release, config_maps)}
    names = ", ".join(sorted(releases))
    if not releases:
        raise NotFoundError(
            f"there is no Ludus release in {source}; install one with `helm install ludus "
            "charts/ludus`, or choose another namespace with --namespace"
        )
    if name is not None and name not in releases:
        hint = did_you_mean(name, releases) or f"it has {names}"
        raise NotFoundError(f"there is no release '{name}' in {source}; {hint}")
    if name is None and len(releases) > 1:
        raise ConfigError(f"{source} has several releases, {names}; choose one with --release")
    return releases[name] if name is not None else next(iter(releases.values()))


def read_release_file(path: Path, name: str | None) -> Release:
    """Read a release from a file of manifests that `helm template` wrote.

    Raises:
        NotFoundError: the file contains no such release.
        ConfigError: the file cannot be read.
    """
    try:
        manifests = parse_yaml_documents(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, DocumentError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from None
    config_maps = [
        manifest
        for manifest in manifests
        if isinstance(manifest, dict)
        and manifest.get("kind") == "ConfigMap"
        and RUNS_LABEL in (manifest["metadata"].get("labels") or {})
    ]
    return choose_release(config_maps, name, f"'{path}'")
