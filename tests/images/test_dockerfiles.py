"""Rules for Dockerfiles, and commands that build the images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from image_requirements import list_requirements
from images import (
    IMAGES,
    Image,
    find_package_folders,
    make_build_command,
    parse_pip_configuration,
    write_secrets,
)

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted({image.dockerfile for image in IMAGES.values()})
SECRET_MOUNTS = ("id=pip.conf", "id=certificates")


def parse_instructions(name: str) -> list[tuple[str, str]]:
    """Return the (keyword, arguments) of each instruction, with continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [
        (keyword, arguments.strip())
        for keyword, _, arguments in (line.partition(" ") for line in lines)
    ]


def parse_stages(name: str) -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage, starting with FROM."""
    stages: list[list[tuple[str, str]]] = []
    for instruction in parse_instructions(name):
        if instruction[0] == "FROM":
            stages.append([])
        if stages:
            stages[-1].append(instruction)
    return stages


def find_stage(name: str, stage_name: str) -> list[tuple[str, str]]:
    """Return the instructions of a named stage."""
    return next(stage for stage in parse_stages(name) if stage[0][1].endswith(f" AS {stage_name}"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_runs_as_a_numeric_user_with_dumb_init(name: str) -> None:
    final_stage = parse_stages(name)[-1]
    # `runAsNonRoot` of Kubernetes requires a numeric user.
    assert [arguments for keyword, arguments in final_stage if keyword == "USER"] == ["1000:1000"]
    entrypoints = [arguments for keyword, arguments in final_stage if keyword == "ENTRYPOINT"]
    assert entrypoints and entrypoints[0].startswith('["dumb-init", "--single-child", "--"')


@pytest.mark.parametrize("name", DOCKERFILES)
def test_pip_installs_use_constraints_and_secret_mounts(name: str) -> None:
    run_commands = [
        arguments for keyword, arguments in parse_instructions(name) if keyword == "RUN"
    ]
    install_commands = [
        command
        for command in run_commands
        if re.search(r"pip.*? install", command) and "--no-deps" not in command
    ]
    assert install_commands
    for command in install_commands:
        assert command.count(" install ") == command.count("--constraint constraints.txt"), command
        assert all(secret in command for secret in SECRET_MOUNTS), command


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_contains_no_index_host_or_secret(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert (
        re.findall(r"https?://|--trusted-host|PIP_(?:EXTRA_)?INDEX|find-links (?!of)", text) == []
    )
    # The build argument for the PyTorch index has an empty default.
    assert all(
        arguments in ("TORCH_INDEX_URL=",)
        for keyword, arguments in parse_instructions(name)
        if "INDEX" in arguments and keyword == "ARG"
    )
    copy_arguments = [
        arguments for keyword, arguments in parse_instructions(name) if keyword in ("COPY", "ADD")
    ]
    assert not any(
        "pip.conf" in arguments or "certificates" in arguments for arguments in copy_arguments
    )


@pytest.mark.parametrize("name", DOCKERFILES)
def test_last_stage_has_no_run_instruction(name: str) -> None:
    assert all(keyword != "RUN" for keyword, _ in parse_stages(name)[-1])


@pytest.mark.parametrize(
    "name", [name for name in DOCKERFILES if name != "charts/store.Dockerfile"]
)
def test_code_change_reinstalls_no_dependency(name: str) -> None:
    dependency_copies = [
        arguments for keyword, arguments in find_stage(name, "dependencies") if keyword == "COPY"
    ]
    assert dependency_copies
    for files in dependency_copies:
        if files.startswith("--from=manifests "):  # contains only pyproject.toml files
            continue
        assert all(
            re.search(r"(pyproject\.toml|\.txt|image_requirements\.py|trim_packages\.sh)$", source)
            for source in files.split()[:-1]
        )
    # Packages built from code need no index and are copied last.
    code_commands = [
        arguments for keyword, arguments in find_stage(name, "code") if keyword == "RUN"
    ]
    assert code_commands and all(
        "--mount" not in command and "--no-deps" in command for command in code_commands
    )
    copy_arguments = [
        arguments for keyword, arguments in parse_stages(name)[-1] if keyword == "COPY"
    ]
    assert copy_arguments[-1] == "--from=code /opt/ludus /opt/ludus"


def test_dockerignore_excludes_all_files_by_default() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"


def test_requirements_are_third_party_packages() -> None:
    folders = [ROOT / name for name in ("proto", "envs/sdk", "services")]
    requirement_lines = list_requirements(folders, {"kubernetes"})
    assert any(line.startswith("grpcio") for line in requirement_lines)
    assert not any(line.startswith(("ludus", "kubernetes")) for line in requirement_lines)


def test_image_pip_settings_match_the_local_pip_settings(tmp_path: Path) -> None:
    index = tmp_path / "mirror" / "simple"
    wheels = tmp_path / "wheels"
    index.mkdir(parents=True)
    wheels.mkdir()
    pip_output = (
        "global.index-url='https://a/'\n:env:.index-url='https://b/'\nglobal.cert='/here.pem'\n"
        "global.constraint='/here/constraints.txt'\n"
    )
    pip_output += (
        f"global.extra-index-url='file://{index}'\nglobal.find-links='{wheels} https://d/'\n"
    )
    configuration = parse_pip_configuration(pip_output)
    assert configuration["index-url"] == "https://b/"
    assert find_package_folders(configuration) == [tmp_path / "mirror", wheels]
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    write_secrets(secrets, configuration)
    assert "index-url = https://b/" in (secrets / "pip.conf").read_text(encoding="utf-8")
    assert "here.pem" not in (secrets / "pip.conf").read_text(encoding="utf-8")
    assert "constraint" not in (secrets / "pip.conf").read_text(encoding="utf-8")


def test_build_command_mounts_secrets_and_mounts_volumes_only_for_buildah(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").touch()
    monkeypatch.setenv("TORCH_INDEX_URL", "https://wheels/")
    image = Image("ludus/try", "trainer/Dockerfile", {"ACCELERATOR": "cpu"})
    command = make_build_command("buildah", image, "try:dev", tmp_path, [Path("/opt/wheels")])
    assert "/opt/wheels:/opt/wheels:ro" in command
    assert f"id=pip.conf,src={tmp_path}/pip.conf" in command
    assert {"ACCELERATOR=cpu", "TORCH_INDEX_URL=https://wheels/"} <= set(command)
    assert "--volume" not in make_build_command(
        "docker", image, "try:dev", tmp_path, [Path("/opt/wheels")]
    )


def test_skaffold_builds_the_same_images_and_passes_tags_to_the_chart() -> None:
    config = yaml.safe_load((ROOT / "skaffold.yaml").read_text(encoding="utf-8"))
    built_images = {
        (
            artifact["image"],
            artifact["docker"]["dockerfile"],
            *artifact["docker"].get("buildArgs", {}).values(),
        )
        for artifact in config["build"]["artifacts"]
    }
    names = ("gateway", "env-openspiel", "trainer", "store")
    images = [IMAGES[name] for name in names]
    assert built_images == {
        (f"docker.io/{image.name}", image.dockerfile, *image.arguments.values()) for image in images
    }
    (release,) = config["deploy"]["helm"]["releases"]
    values = yaml.safe_load((ROOT / release["valuesFiles"][0]).read_text(encoding="utf-8"))
    templates = release["setValueTemplates"]
    for image in images:
        name = f"docker_io_{image.name}".replace("/", "_").replace("-", "_")
        for part in ("IMAGE_DOMAIN", "IMAGE_REPO_NO_DOMAIN", "IMAGE_TAG"):
            assert f"{{{{.{part}_{name}}}}}" in templates.values()
    repositories = {
        environment["image"]["repository"] for environment in values["environments"].values()
    }
    assert repositories == {"ludus/env-openspiel"}


def test_skaffold_builds_the_same_images_without_docker() -> None:
    config = yaml.safe_load((ROOT / "skaffold.yaml").read_text(encoding="utf-8"))
    profiles = {profile["name"]: profile for profile in config["profiles"]}
    built_images = {
        artifact["image"]: artifact["custom"]
        for artifact in profiles["buildah"]["build"]["artifacts"]
    }
    assert list(built_images) == [artifact["image"] for artifact in config["build"]["artifacts"]]
    for image, builder in built_images.items():
        name = builder["buildCommand"].removeprefix("python3 dev/images.py --skaffold ")
        assert f"docker.io/{IMAGES[name].name}" == image
        dependency_paths = builder["dependencies"]["paths"]
        assert all((ROOT / path).exists() for path in dependency_paths)
        assert any(IMAGES[name].dockerfile.startswith(path) for path in dependency_paths)
    (serving_release,) = profiles["serving"]["deploy"]["helm"]["releases"]
    (helm_release,) = config["deploy"]["helm"]["releases"]
    template_values = serving_release["setValueTemplates"]
    assert template_values == {
        name: helm_release["setValueTemplates"][name] for name in template_values
    }
