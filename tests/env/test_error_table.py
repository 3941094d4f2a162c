"""The table in docs/errors.md matches the error codes and their statuses on each wire."""

import re
from pathlib import Path

from ludus.env.messages.status import STATUSES_BY_CODE
from ludus.proto.errors import ErrorCode, make_wire_error

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW_PATTERN = re.compile(
    r"^\| `([A-Z_]+)` \| (.+) \| (\d+) \| `([A-Z_]+)` \| (.+) \| (yes|no|none) \|$"
)


def read_rows() -> dict[str, tuple[str, ...]]:
    matches = [ROW_PATTERN.match(line) for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {match[1]: match.groups()[1:] for match in matches if match}


def test_docs_page_lists_every_error_code_once() -> None:
    lines = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    assert len(read_rows()) == len(lines) == len(ErrorCode)
    assert set(read_rows()) == set(ErrorCode)


def test_docs_page_has_the_correct_status_of_every_code_on_each_wire() -> None:
    assert set(STATUSES_BY_CODE) == set(ErrorCode)
    for code in ErrorCode:
        _, http_status, grpc_status, _, _ = read_rows()[code]
        assert (int(http_status), grpc_status) == (
            STATUSES_BY_CODE[code].http_status,
            STATUSES_BY_CODE[code].grpc_status.name,
        )


def test_docs_page_lists_the_errors_that_end_a_session() -> None:
    ending_codes = {code for code, row in read_rows().items() if row[-1] == "no"}
    assert ending_codes == {"SESSION_ERROR", "SESSION_LOST", "TIMEOUT", "REPLAY_MISMATCH"}
    for code in ErrorCode:
        assert make_wire_error(code, "message").code is code
