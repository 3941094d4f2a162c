"""Code that searches everything that it can read for the secrets of a fleet.

The actions of `code_env.py` and programs in containers are such code. The secrets have a prefix
that the code recognizes, so that it does not contain them itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

# The code contains the prefix of the secrets in pieces, so that it does not find itself.
_SEARCH_CODE = """
import gc, os, re
pattern = re.compile(b"fleet" + b"-secret-" + b"[0-9a-f]{32}")
found_places = set()
def look(place, content):
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")
    if pattern.search(content):
        found_places.add(place)
def look_at_file(path):
    try:
        with open(path, "rb") as file:
            look(path, file.read(1 << 20))
    except (OSError, ValueError):
        pass
look("os.environ", repr(dict(os.environ)))
all_pids = [name for name in os.listdir("/proc") if name.isdigit()] + ["self"]
for pid in all_pids:
    for name in ("environ", "cmdline"):
        look_at_file(f"/proc/{pid}/{name}")
    try:
        descriptors = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        descriptors = []
    for path in descriptors:
        try:
            is_file = os.readlink(path).startswith("/") and os.path.isfile(path)
        except OSError:
            continue
        if is_file:
            look_at_file(path)
    try:
        lines = open(f"/proc/{pid}/maps").read().splitlines() if pid in (pids or all_pids) else []
        memory = open(f"/proc/{pid}/mem", "rb", 0) if lines else None
    except OSError:
        continue
    for line in lines:
        span, mode, *_ = line.split()
        start, end = (int(text, 16) for text in span.split("-"))
        if "r" not in mode or "w" not in mode or end - start > 1 << 28:
            continue
        try:
            memory.seek(start)
            look(f"memory of {pid}", memory.read(end - start))
        except (OSError, ValueError, OverflowError):
            pass
for thing in gc.get_objects():
    if type(thing) is dict:
        for content in list(thing.values()):
            if type(content) in (str, bytes):
                look("objects", content)
for folder in folders:
    for parent, children, names in os.walk(folder):
        if parent == "/":
            children[:] = [name for name in children if name not in ("proc", "sys")]
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                look_at_file(path)
result = sorted(found_places)
"""


def make_secret() -> str:
    """Return a new secret that the search recognizes."""
    return f"fleet-secret-{secrets.token_hex(16)}"


def make_search_code(pids: Sequence[str], folders: Sequence[str]) -> str:
    """Return code that sets `result` to the places of secrets.

    Args:
        pids: processes whose memory is searched; empty means all processes.
        folders: folders whose files are searched.
    """
    return f"pids, folders = {list(pids)!r}, {list(folders)!r}\n{_SEARCH_CODE}"
