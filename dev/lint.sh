#!/usr/bin/env bash
# Style, layers and types; all three run even if one fails.
cd "$(dirname "$0")/.." || exit 1
failed=0
.venv/bin/ruff check . || failed=1
.venv/bin/ruff format --check . || failed=1
.venv/bin/lint-imports --no-cache || failed=1
.venv/bin/mypy || failed=1
exit $failed
