#!/usr/bin/env bash
# Installs the wheels of dist/ in a new virtual environment and trains from an empty folder, without
# access to the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$PWD/dist
python=${PYTHON:-python3.11}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
"$python" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --find-links "$dist" \
  --constraint "$dist/constraints.txt" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} 'ludus[train]'
mkdir work
cd work
export PATH=$scratch/venv/bin:$PATH
ludus --version
ludus init blackjack
ludus train blackjack.toml --set training.num_steps=3 --set eval.num_games=100 --set eval.num_games_during=50
test -f runs/blackjack/report.html
