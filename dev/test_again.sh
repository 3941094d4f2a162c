#!/usr/bin/env bash
# The tests that failed last, alone: what fails beside others alone still fails, a race may not, so
# the names stay in the log whatever comes of it.
set -euo pipefail
cd "$(dirname "$0")/.."
kept=.pytest_cache/v
if [ "$(cat $kept/ludus/exit_status 2>&-)" != 1 ]; then
  echo "the tests did not run to their end with some of them failed; run them all"
  exit 1
fi
failed=$(.venv/bin/python -c '
import json
with open("'$kept/cache/lastfailed'", encoding="utf-8") as file:
    print("\n".join(json.load(file)))
')
if [ "$(wc -l <<<"$failed")" -gt 5 ]; then
  echo "more than five tests failed; none gets a second chance"
  exit 1
fi
echo "FAILED THE FIRST TIME, tried again alone:"
echo "$failed"
.venv/bin/python -m pytest --last-failed --last-failed-no-failures none
echo "PASSED ONLY ALONE, look at them:"
echo "$failed"
