# `make pretrain` and `make test` work on a fresh clone: both set up .venv first, if it is missing or out of date.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup setup-base setup-targets setup-docs pretrain one test test-all test-floor coverage lint format typecheck docs pins clean

bin := .venv/bin
ARGS ?=
pytest := -m pytest -n auto --maxprocesses 4 --dist loadfile --max-worker-restart 0

help: ## This list
	@echo "make TARGET [ARGS='...'] [PYTHON=/path/to/python3.12] [EXTRAS=cuda|rocm|hf|eval|s3|gcs|notebook]"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' Makefile | while IFS='|' read -r name text; do \
	    printf '%-16s%s\n' "$$name" "$$text"; done

setup: ## The pinned environment in .venv (again only when the pinned set has changed)
	@tools/setup.sh .venv requirements/dev.txt

setup-base: ## Only the packages for training; nothing to do if .venv has the whole set
	@tools/setup.sh .venv requirements/base.txt

setup-targets: setup ## The compilers for absent GPUs (experiments.compile)
	@tools/setup_targets.sh .venv .venv-targets

setup-docs: ## The packages that build the site, in .venv-docs
	@EXTRAS= tools/setup.sh .venv-docs requirements/docs.txt

pretrain: setup-base ## Train: the embedded tiny run, or ARGS='--config=... --workdir=...'
	@$(bin)/python -m experiments.pretrain $(ARGS)

one: setup ## Some tests in one process, slow ones too: T=tests/optim/test_against_torch.py ARGS='-k bucket --pdb'
	@$(if $(T),,$(error make one T=tests/optim/test_against_torch.py: T is what to test))
	@$(bin)/python -m pytest -n 0 -m "slow or not slow" $(T) $(ARGS)

test: setup setup-docs ## The default tests (ARGS='tests/model -k rope' for some)
	@$(bin)/python $(pytest) $(ARGS)

test-all: setup setup-docs ## The slow tests too
	@$(bin)/python $(pytest) -m "slow or not slow" $(ARGS)

test-floor: ## The default tests on the oldest JAX that is supported, in .venv-floor
	@EXTRAS= tools/setup.sh .venv-floor requirements/floor.txt
	@.venv-floor/bin/python $(pytest) $(ARGS)

coverage: setup ## The default tests with line and branch coverage
	@$(bin)/coverage run -m pytest $(ARGS)
	@$(bin)/coverage report

lint: setup ## Style and formatting, checked
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .

format: setup ## Style and formatting, fixed
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .

typecheck: setup ## Types
	@$(bin)/mypy

docs: setup-docs ## The documentation as a site in build/site; ARGS=serve shows it while you write
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true .venv-docs/bin/mkdocs $(or $(ARGS),build)
	@[ -n "$(ARGS)" ] || echo "build/site/index.html"

pins: ## Resolve requirements/ again
	@tools/pin.sh

clean: ## Remove the environments and caches (not runs/, nor the tests' compiled programs in ~/.cache/zaya_jax)
	rm -rf .venv .venv-docs .venv-floor .cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
