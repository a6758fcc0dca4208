# make reproduce   every table and figure at the laptop scale
# make headline    Table 1's pretrained and Focus rows, and one figure
# make test        linters and tests
# make env         only the environment, .venv, from envs/requirements.lock

PYTHON ?= python3.11
READY := .venv/.ready
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: reproduce headline test env
reproduce: $(READY)
	.venv/bin/snakemake --cores all

headline: $(READY)
	.venv/bin/snakemake --cores all headline

test: $(READY)
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/snakefmt --check Snakefile workflow && .venv/bin/snakemake --lint
	OMP_NUM_THREADS=1 .venv/bin/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

env: $(READY)

# The stamp comes last, so a half-made environment is made anew.
$(READY): envs/requirements.lock
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install --requirement envs/requirements.lock
	.venv/bin/pip install --no-deps --no-build-isolation --editable .
	touch $@
