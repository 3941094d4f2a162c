"""Run the tests that failed last again, alone, and count the tests that then pass.

    python dev/test_again.py

At most five tests get a second chance. Each test that passes only alone is counted in
tests/retries.json: commit that file, so that a flaky test cannot hide.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "v"
RETRIES_FILE = ROOT / "tests" / "retries.json"
MAX_RETRIED_TESTS = 5


def main() -> int:
    """Run the failed tests again; return the exit status."""
    status_file = CACHE / "ludus" / "exit_status"
    exit_status = status_file.read_text(encoding="utf-8").strip() if status_file.is_file() else ""
    if exit_status == "0":
        print("no test failed, so none gets a second chance")
        return 1
    if exit_status != "1":
        print("the tests did not run to their end; run them all")
        return 1
    failed_tests = list(json.loads((CACHE / "cache" / "lastfailed").read_text(encoding="utf-8")))
    if len(failed_tests) > MAX_RETRIED_TESTS:
        print(f"{len(failed_tests)} tests failed; at most {MAX_RETRIED_TESTS} get a second chance")
        return 1
    print("FAILED THE FIRST TIME, run again alone:", *failed_tests, sep="\n  ")
    command = [sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures=none"]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        return 1
    counts = json.loads(RETRIES_FILE.read_text(encoding="utf-8")) if RETRIES_FILE.is_file() else {}
    for test in failed_tests:
        counts[test] = counts.get(test, 0) + 1
    RETRIES_FILE.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print("PASSED ONLY ALONE, counted in tests/retries.json:", *failed_tests, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
