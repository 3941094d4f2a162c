"""Reading of files that `torch.save` wrote, without running code and with bounded memory and time.

`torch.save` writes a ZIP archive without compression, but `torch.load` also reads compressed ones,
in which a few bytes can become any number, and other formats.
"""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from ludus.trainer.core.pickle_limits import check_pickle

_ARCHIVE_START = b"PK\x03\x04"
_PICKLE_NAME = "data.pkl"


def load_plain_values(file: Path | IO[bytes], device: str | torch.device = "cpu") -> Any:
    """Return the tensors and plain values in a file.

    Raises:
        UnpicklingError: the file contains another object.
        ValueError: the file is compressed or damaged, takes too long to read, or is not a regular
            file.
    """
    if isinstance(file, Path):
        require_regular_file(file)
        with file.open("rb") as stream:
            return load_plain_values(stream, device)
    check_archive(file)
    return torch.load(file, map_location=device, weights_only=True)


def check_archive(file: IO[bytes]) -> None:
    """Check that the values in a file need no more memory and time than its size allows.

    Raises:
        ValueError: they need more, or the file is damaged.
    """
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(len(_ARCHIVE_START)) != _ARCHIVE_START:
        raise ValueError("torch.save did not write the file")
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is damaged ({error})") from None
    entries = archive.infolist()
    is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if is_compressed or sum(entry.file_size for entry in entries) > num_bytes:
        raise ValueError("its values are compressed, which torch.save never does")
    for entry in entries:
        if entry.filename.endswith(_PICKLE_NAME):
            check_pickle(archive.read(entry))
    file.seek(0)


def require_regular_file(path: Path) -> None:
    """Check that reading a path ends, unlike that of a device or of a named pipe.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the path is anything else than a file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"'{path.name}' is not a file")
