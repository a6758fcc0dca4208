#!/usr/bin/env bash
# Run by Snakemake inside the new environment, from the repository.
set -euo pipefail
python -m pip install --requirement envs/requirements.lock
python -m pip install --no-deps --no-build-isolation --editable .
