#!/usr/bin/env bash
# Builds the documentation site into build/site and checks every link, offline.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
# Without its warnings (--quiet), mkdocs would not fail on a broken link.
NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
echo "build/site/index.html"
