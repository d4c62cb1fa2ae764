#!/usr/bin/env bash
# Lint, types, layers and tests, in an environment of its own where none is active.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/setup.sh
setup dev
export DS_ACCELERATOR=${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
ruff check .
ruff format --check .
mypy
lint-imports
python -m pytest -q "$@"
