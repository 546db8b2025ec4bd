# Every verb needs nothing but python3 (>= 3.11) with venv and pip: the first call builds .venv.
#   make test ARGS="-k gate"      extra arguments for the program behind a verb
#   make test PYTHON=python3.12   the interpreter that builds .venv

PYTHON ?= python3
SEEDS  ?= 2000
SOAK_SECONDS ?= 600
ARGS   ?=

VENV    := .venv
RUN     := $(VENV)/bin/python
STAMP   := $(VENV)/.installed
PIP     := $(RUN) -m pip --disable-pip-version-check -qq
BENCHES := $(subst /,.,$(basename $(filter-out %/__init__.py,$(wildcard bench/micro/*.py bench/end_to_end/*.py))))

.DEFAULT_GOAL := help
.PHONY: help demo test check sim soak bench gpu

help:
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))

## make demo     train one model on two devices and watch
demo: $(STAMP)
	@$(RUN) examples/demo.py $(ARGS)

## make test     all tests
test: $(STAMP)
	@$(RUN) -m pytest $(ARGS)

## make check    format, lint, types and the contract tests: what a commit must pass
check: $(STAMP)
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest tests/contract

## make sim      random virtual clusters; SEEDS=100000 for a night
sim: $(STAMP)
	@$(RUN) -m flowdp.sim --seeds $(SEEDS) $(ARGS)

## make soak     every failure in every kind of run, then random runs: does anything grow? SOAK_SECONDS each
soak: $(STAMP)
	@$(RUN) -m bench.reliability.failures --seconds $(SOAK_SECONDS) $(ARGS)
	@$(RUN) -m bench.reliability.soak --seconds $(SOAK_SECONDS) $(ARGS)

## make bench    every bench in turn; ARGS=--save writes bench/results
bench: $(STAMP)
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(RUN) -m $$bench $(ARGS); done

## make gpu      the checks for a machine with CUDA, on $(PYTHON) as it is: no .venv
gpu:
	@$(PYTHON) -m bench.gpu $(ARGS)

# torch comes first and by its exact pin: a resolver that may choose takes a CUDA build of gigabytes.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; a few minutes)"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
