#!/usr/bin/env bash
# Run by Snakemake inside the new environment, from the repository. Without flash-attn, torch's own kernels serve.
set -euo pipefail
python -m pip install --requirement envs/requirements.lock
python -m pip install --no-deps --no-build-isolation --editable .
python -m pip install --no-deps --no-build-isolation --requirement envs/flash.txt ||
    echo "flash-attn could not be built; torch's own kernels will be used" >&2
