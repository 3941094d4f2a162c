#!/usr/bin/env bash
# Builds dist/: one wheel per member of the workspace, and the lock files.
#
#   pip install --find-links dist --constraint dist/constraints.txt 'ludus[train]'
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist
mkdir dist
members=()
while read -r member; do members+=("$member"); done < <(.venv/bin/python dev/members.py)
.venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist "${members[@]}"
# setuptools leaves copies of all modules, which checks of the repository would find.
for member in "${members[@]}"; do rm -rf "$member/build"; done
cp constraints.txt constraints-cuda.txt dist/
ls dist
