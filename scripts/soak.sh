#!/usr/bin/env bash
# 200 tiny rounds of collection ahead of training, with processes killed at random; about 20 minutes on two cores.
#   scripts/soak.sh [--rounds N] [--kills N] [--seed N] [--out FILE.json]
# Ends with 0 when the ledger is intact and nothing leaks. The figures are JSON; docs/reliability.md has ours.
set -eu
cd "$(dirname "$0")/.."
make --quiet setup
exec .venv/bin/python scripts/soak.py "$@"
