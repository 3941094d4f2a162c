#!/usr/bin/env bash
# Checks style, import contracts, types and commit subjects. All checks run even if one fails.
cd "$(dirname "$0")/.." || exit 1
failed=0
.venv/bin/ruff check . || failed=1
.venv/bin/ruff format --check . || failed=1
.venv/bin/lint-imports --no-cache || failed=1
.venv/bin/mypy || failed=1
.venv/bin/python dev/commit_subjects.py || failed=1
exit $failed
