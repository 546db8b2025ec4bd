# Every verb needs nothing but python3 (>= 3.11) with venv and pip: the first call builds .venv.
#   make test ARGS="-k gate"      extra arguments for the program behind a verb
#   make test WORKERS=2           so many tests at a time; else one for each core that may be used
#   make test PYTHON=python3.12   the interpreter that builds .venv

PYTHON ?= python3
SEEDS  ?= 2000
SOAK_SECONDS ?= 600
WORKERS ?= auto
ARGS   ?=

# With which torch, and with what beside it; .ci has other constraints.
CONSTRAINTS ?= constraints.txt
EXTRAS      ?= dev

VENV    := .venv
RUN     := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)/python
STAMP   := $(VENV)/.installed
DEMO    := $(VENV)/.demo
# With one line of progress; the first argument is its title.
PIP     := -m pip --disable-pip-version-check --no-input install --progress-bar off -c $(CONSTRAINTS)
INSTALL := $(PYTHON) .ci/install.py
# timm needs torchvision, which PyPI has for CUDA alone. Where it is found and cannot be imported, transformers and
# torchmetrics cannot be either, so both have a folder of their own: see tests/vision.py.
VISION  := $(PIP) --upgrade --no-deps --target $(VENV)/vision timm torchvision
# The libraries that flowdp is measured beside have an environment of their own, without the tools of development.
PEERS       := .venv-peers
PEERS_RUN   := $(PEERS)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)/python
PEERS_STAMP := $(PEERS)/.installed

BENCHES := $(subst /,.,$(basename $(filter-out %/__init__.py,$(wildcard bench/micro/*.py bench/end_to_end/*.py))))

# Several processes, each with one test at a time: tests may count threads and change settings of their process.
# A process takes one file after the other, whose tests share fixtures: some are jobs of several processes.
PYTEST  := $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK   := tests/policy tests/protocol tests/machine tests/threads tests/test_doors.py
# `make check test` runs the contract tests once.
CHECKED := $(if $(filter check,$(MAKECMDGOALS)),--ignore=tests/contract)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast check docs docs-serve sizes sim soak bench bench-peers pictures gpu

help:
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))

## make demo     train one model on two devices and watch
demo: $(DEMO)
	@$(RUN) examples/demo.py $(ARGS)

## make test     all tests, as many at a time as there are cores
test: $(STAMP)
	@$(PYTEST) $(CHECKED) $(ARGS)

## make test-fast  the pure layers, the contract tests, and a run through each door: under a minute
test-fast: $(STAMP)
	@$(PYTEST) $(QUICK) $(if $(CHECKED),,tests/contract) $(ARGS)

## make check    format, lint, types and the contract tests: what a commit must pass
check: $(STAMP)
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest tests/contract

## make docs     the documentation as a site, in site/; without network
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet $(ARGS)
	@echo "Built site/index.html; make docs-serve has the search, too"

## make docs-serve  the site on http://127.0.0.1:8000, built anew at each change
docs-serve: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve $(ARGS)

## make sizes    the longest modules and functions
sizes:
	@$(PYTHON) -m bench.sizes $(ARGS)

## make sim      random virtual clusters; SEEDS=100000 for a night
sim: $(STAMP)
	@$(RUN) -m tests.simulator --seeds $(SEEDS) $(ARGS)

## make soak     every failure in every kind of run, then random runs: does anything grow? SOAK_SECONDS each
soak: $(STAMP)
	@$(RUN) -m bench.reliability.failures --seconds $(SOAK_SECONDS) $(ARGS)
	@$(RUN) -m bench.reliability.soak --seconds $(SOAK_SECONDS) $(ARGS)

## make bench    every bench in turn; ARGS=--save writes bench/results
bench: $(STAMP)
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(RUN) -m $$bench $(ARGS); done

## make bench-peers  flowdp beside DDP, Accelerate, Lightning and Fabric; a quarter of an hour; ARGS=--quick
bench-peers: $(PEERS_STAMP)
	@$(PEERS_RUN) -m bench.peers $(ARGS)

## make pictures  the pictures of README and docs, from real runs in Chromium, JupyterLab and tmux
pictures: $(STAMP)
	@$(RUN) -m docs.pictures

## make gpu      the checks for a machine with CUDA, on $(PYTHON) as it is: no .venv
gpu:
	@$(PYTHON) -m bench.gpu $(ARGS)

# torch comes first and by its exact pin: a resolver that may choose takes a CUDA build of gigabytes. The demo needs
# little more, so that a newcomer need not wait for the tools of development. Sizes are those of downloads on Linux, with
# the CPU build of torch.
$(DEMO): pyproject.toml $(CONSTRAINTS)
	@test -x $(RUN) || { echo "Making $(VENV), once: a few minutes"; $(PYTHON) -m venv $(VENV); }
	@$(INSTALL) "Installing torch (190 MB)" $(RUN) $(PIP) "$$(grep -wm1 '^torch' $(CONSTRAINTS))"
	@$(INSTALL) "Installing flowdp and the demo (60 MB)" $(RUN) $(PIP) -e '.[demo]'
	@touch $@

$(STAMP): $(DEMO)
	@$(INSTALL) "Installing the tools of development (330 MB)" $(RUN) $(PIP) -e '.[$(EXTRAS)]'
	@$(if $(filter dev,$(EXTRAS)),$(INSTALL) "Installing timm for its tests (10 MB)" $(RUN) $(VISION))
	@touch $@

$(PEERS_STAMP): pyproject.toml $(CONSTRAINTS)
	@test -x $(PEERS_RUN) || { echo "Making $(PEERS), once: a few minutes"; $(PYTHON) -m venv $(PEERS); }
	@$(INSTALL) "Installing torch (190 MB)" $(PEERS_RUN) $(PIP) "$$(grep -wm1 '^torch' $(CONSTRAINTS))"
	@$(INSTALL) "Installing Lightning and Accelerate" $(PEERS_RUN) $(PIP) -e '.[peers]'
	@touch $@
