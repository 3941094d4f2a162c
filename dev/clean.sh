#!/usr/bin/env bash
# Removes .venv, caches and runs, without a question.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .venv .cache runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
find . -name __pycache__ -type d -prune -exec rm -rf {} +
find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
