"""Write the gRPC stubs of every .proto file in proto/, or check that they are up to date."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent / "proto"


def write_stubs(output: Path) -> list[Path]:
    """Write the stubs to `output` and return their relative paths."""
    sources = [str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.proto"))]
    output_options = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    exit_status = protoc.main(["protoc", f"-I{ROOT}", *output_options, *sources])
    if exit_status:
        sys.exit(exit_status)
    return sorted(path.relative_to(output) for path in output.rglob("*_pb2*.py*"))


def find_stale_stubs() -> list[Path]:
    """Return the committed stubs that differ from newly generated stubs."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder)
        return [
            path
            for path in write_stubs(draft)
            if not (ROOT / path).exists() or (ROOT / path).read_text() != (draft / path).read_text()
        ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit with 1 if a stub is stale."
    )
    if not parser.parse_args().check:
        write_stubs(ROOT)
    elif stale_stubs := find_stale_stubs():
        sys.exit(f"stale stubs, run `make proto`: {', '.join(map(str, stale_stubs))}")
