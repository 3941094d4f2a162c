"""Build the images with docker, podman or buildah and print their sizes.

    python dev/images.py [--only gateway] [--tag dev] [--engine buildah] [--load]
    python dev/images.py --skaffold gateway

LUDUS_IMAGE_LOADER is the command that loads an archive into the nodes of a cluster. Skaffold sets
IMAGE to the name of the image, and PUSH_IMAGE to true if the image must be pushed.

The configurations of pip (`pip config list`) and apt and the certificates of the machine are build
secrets, and folders with packages are read-only volumes, so no layer contains them. PYTHON_IMAGE
selects another base image; without a registry, `dev/base_image.sh` makes one. On a CPU,
TORCH_INDEX_URL selects an index of PyTorch's CPU wheels.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
ENGINES = ("docker", "podman", "buildah")
LOADER_VARIABLE = "LUDUS_IMAGE_LOADER"
FILE_OPTIONS = ("cert", "client-cert", "constraint", "requirement", "log")
"""Options of pip whose values are paths on this machine."""
CERTIFICATES_FILE = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class Image:
    """An image: its name in a registry, its Dockerfile and the build arguments."""

    name: str
    dockerfile: str
    arguments: dict[str, str] = field(default_factory=dict)
    target: str | None = None
    is_built_by_default: bool = True


def find_environment_images() -> Iterator[Image]:
    """Yield the image of each environment in `envs/`.

    The table `tool.ludus.image` of an environment's pyproject.toml names the optional dependencies
    to install (`extra`), and whether the image is built only by name (`only_by_name`).
    """
    for path in sorted(ROOT.glob("envs/*_env/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = project.get("tool", {}).get("ludus", {}).get("image", {})
        arguments = {"ENVIRONMENT": path.parent.name}
        if "extra" in settings:
            arguments["EXTRA"] = settings["extra"]
        yield Image(
            f"ludus/env-{path.parent.name.removesuffix('_env')}",
            "envs/Dockerfile",
            arguments,
            is_built_by_default=not settings.get("only_by_name", False),
        )


IMAGES = {
    image.name.removeprefix("ludus/"): image
    for image in (
        Image("ludus/gateway", "services/Dockerfile"),
        *find_environment_images(),
        Image("ludus/trainer", "trainer/Dockerfile"),
        Image(
            "ludus/trainer-gpu",
            "trainer/Dockerfile",
            {"ACCELERATOR": "gpu"},
            "gpu",
            is_built_by_default=False,
        ),
        Image("ludus/store", "charts/store.Dockerfile"),
    )
}
DEFAULT_IMAGES = [name for name, image in IMAGES.items() if image.is_built_by_default]


def parse_pip_configuration(listing: str) -> dict[str, str]:
    """Parse the output of `pip config list`; variables override files, as in pip."""
    files: dict[str, str] = {}
    environment: dict[str, str] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        source, _, option = key.partition(".")
        if source in (":env:", "global"):
            (environment if source == ":env:" else files)[option] = str(ast.literal_eval(value))
    return files | environment


def find_package_folders(configuration: dict[str, str]) -> list[Path]:
    """Return the folders of this machine in which pip looks for packages."""
    urls = [
        url
        for option in ("find-links", "index-url", "extra-index-url")
        for url in configuration.get(option, "").split()
    ]
    paths = [unquote(urlsplit(url).path) for url in urls if url.startswith(("/", "file://"))]
    # The pages of an index link to files next to the index.
    folders = [
        Path(path).parent if path.rstrip("/").endswith("/simple") else Path(path) for path in paths
    ]
    return sorted({folder for folder in folders if folder.is_dir()})


def make_build_command(
    engine: str, image: Image, reference: str, secrets: Path, folders: Sequence[Path]
) -> list[str]:
    """Return the engine's command for one image."""
    dockerfile = (ROOT / image.dockerfile).read_text(encoding="utf-8")
    arguments = {
        name: os.environ[name]
        for name in ("PYTHON_IMAGE", "TORCH_INDEX_URL")
        if os.environ.get(name) and f"ARG {name}" in dockerfile
    }
    command = [engine, "build", "--file", image.dockerfile, "--tag", reference, "--network", "host"]
    if image.target is not None:
        command += ["--target", image.target]
    for name, value in (arguments | image.arguments).items():
        command += ["--build-arg", f"{name}={value}"]
    for name in sorted(path.name for path in secrets.iterdir()):
        command += ["--secret", f"id={name},src={secrets / name}"]
    if engine != "docker":
        command += ["--layers", "--pull=false" if engine == "buildah" else "--pull=missing"]
        volumes = (("--volume", f"{folder}:{folder}:ro") for folder in folders)
        command += [word for option in volumes for word in option]
    return [*command, "."]


def write_secrets(folder: Path, configuration: dict[str, str]) -> None:
    """Write the files that a build gets as secrets, if the machine has them.

    The pip options that name files of this machine are left out: a build does not see those files,
    and the Dockerfiles lock every version themselves.
    """
    options = {key: value for key, value in configuration.items() if key not in FILE_OPTIONS}
    if CERTIFICATES_FILE.is_file():
        shutil.copy(CERTIFICATES_FILE, folder / "certificates")
        options["cert"] = str(CERTIFICATES_FILE)
    lines = "".join(f"{key} = {value}\n" for key, value in options.items())
    (folder / "pip.conf").write_text(f"[global]\n{lines}", encoding="utf-8")
    dump = _output("apt-config", "dump") if shutil.which("apt-config") else ""
    lines = "".join(f"{line}\n" for line in dump.splitlines() if line.startswith("Acquire::http"))
    (folder / "apt.conf").write_text(lines, encoding="utf-8")


def write_pip_configuration(engine: str, secrets: Path) -> list[Path]:
    """Write the build secrets to a folder and return the folders with packages."""
    configuration = parse_pip_configuration(_output(sys.executable, "-m", "pip", "config", "list"))
    folders = find_package_folders(configuration)
    if engine == "docker" and folders:
        sys.exit(
            f"error: pip uses the folders {', '.join(map(str, folders))}, which docker cannot mount"
            " during a build; use --engine podman or buildah, or configure pip with an index"
        )
    write_secrets(secrets, configuration)
    return folders


def measure_size(engine: str, reference: str) -> int:
    """Return the unpacked size of an image, in bytes."""
    if engine == "buildah":
        description = json.loads(_output(engine, "inspect", "--type", "image", reference))
        return sum(layer["size"] for layer in json.loads(description["Manifest"])["layers"])
    return int(_output(engine, "image", "inspect", "--format", "{{.Size}}", reference))


def save_image(engine: str, reference: str, file: Path) -> None:
    """Write an archive of the image that docker, kind and containerd can load."""
    if engine == "buildah":
        _output(engine, "push", reference, f"docker-archive:{file}:{reference}")
    else:
        _output(engine, "save", "--output", str(file), reference)


def push_image(engine: str, reference: str) -> None:
    """Push the image to its registry; a registry on this machine may have no TLS."""
    is_local = engine != "docker" and reference.startswith(("localhost:", "127.0.0.1:"))
    _output(engine, "push", *(["--tls-verify=false"] if is_local else []), reference)


def report_and_load(engine: str, reference: str, loader: Sequence[str]) -> None:
    """Print the size of the image and load it into a cluster if there is a loader."""
    sys.stdout.write(f"{reference:44} {measure_size(engine, reference) / 1e6:6.0f} MB unpacked\n")
    sys.stdout.flush()
    if loader:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "image.tar"
            save_image(engine, reference, archive)
            subprocess.run([*loader, str(archive)], check=True)


def find_engine() -> str:
    """Return the first engine that is installed and works (docker needs its daemon)."""
    for engine in ENGINES:
        if (
            shutil.which(engine)
            and not subprocess.run([engine, "info"], capture_output=True).returncode
        ):
            return engine
    sys.exit("error: there is no docker, podman or buildah; for example apt-get install buildah")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Build the images and print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=IMAGES, default=DEFAULT_IMAGES, metavar="IMAGE"
    )
    parser.add_argument("--tag", default="dev")
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument(
        "--load", action="store_true", help=f"load the images into a cluster with {LOADER_VARIABLE}"
    )
    parser.add_argument("--skaffold", choices=IMAGES, metavar="IMAGE", help="build for Skaffold")
    arguments = parser.parse_args()
    references = {f"docker.io/{IMAGES[name].name}:{arguments.tag}": name for name in arguments.only}
    if arguments.skaffold:
        references = {os.environ["IMAGE"]: arguments.skaffold}
    engine = arguments.engine or find_engine()
    loader = shlex.split(os.environ.get(LOADER_VARIABLE, ""))
    if arguments.load and not loader:
        sys.exit(f"error: --load needs {LOADER_VARIABLE}, for example 'kind load image-archive'")
    if not (arguments.load or arguments.skaffold):
        loader = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            folders = write_pip_configuration(engine, Path(folder))
            for reference, name in references.items():
                command = make_build_command(engine, IMAGES[name], reference, Path(folder), folders)
                subprocess.run(command, cwd=ROOT, check=True)
                if arguments.skaffold and os.environ.get("PUSH_IMAGE") == "true":
                    push_image(engine, reference)
                report_and_load(engine, reference, loader)
    except subprocess.CalledProcessError as error:
        command = " ".join(error.cmd[:3])
        sys.exit(f"error: {command} ... exited with {error.returncode}\n{error.stderr or ''}")


if __name__ == "__main__":
    main()
