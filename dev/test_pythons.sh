#!/usr/bin/env bash
# Runs the fast tests with each further Python version that is installed, in .cache/python-VERSION.
# Names the versions that are not installed. In CI an environment is deleted after its tests: with
# CUDA's libraries, which PyPI's PyTorch requires, it takes several gigabytes.
set -euo pipefail
cd "$(dirname "$0")/.."

# find_python VERSION: print the path of an interpreter. pyenv's interpreters need not be activated.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$candidate" -c '' >/dev/null 2>&1; then command -v "$candidate"; return; fi
  done
  return 1
}

for version in 3.12 3.13; do
  if ! python=$(find_python "$version"); then
    echo "SKIPPED, NOT PASSED: fast tests with Python $version: it is not installed"
    continue
  fi
  venv=.cache/python-$version
  VENV=$venv PYTHON=$python bash dev/setup.sh
  echo "fast tests with Python $version"
  pytest=("$venv/bin/python" -m pytest -o "cache_dir=$venv/pytest" --hypothesis-profile=quick
    -m "not slow and not conformance and not chaos and not cluster")
  # Failed tests run once more, alone: the other process may have delayed them.
  "${pytest[@]}" -n 2 --dist loadscope --no-loadscope-reorder ||
    "${pytest[@]}" --last-failed --last-failed-no-failures=none
  if [ -n "${CI:-}" ]; then rm -rf "$venv"; fi
done
