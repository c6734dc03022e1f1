# From a fresh clone, each of these does everything that it needs: environment, packages, models, then the job.
#   make campaign   a real GRPO campaign with token capture; leaves reports/<run>/campaign.ipynb
#   make bench      the benchmarks, against the reference and the hardware's limit; leaves reports/benchmarks/
#   make test       lint, types and all tests, those with a real engine included
# Variables: RECIPE, ARGS="key=value …", EXTRAS=gpu,dev, PYTHON, PYTEST_ARGS, FUZZ_SECONDS, SOAK_GROUPS, QUESTIONS.

RECIPE ?= cpu_smollm2
ARGS ?=
EXTRAS ?= cpu,dev
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 600
# Two processes on two cores; more only where there are more. What starts an engine stays in one of them (conftest.py).
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The fast tests wait for a third of their time: two processes more than there are cores. So many leave no core for the
# threads of torch in each, which would spin away a fifth of it while they wait for another; `test` leaves them as they are.
# Where PYTHONDONTWRITEBYTECODE is set (as in many images), each process would compile all tests anew: a seventh of it.
FAST_TESTS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest \
	-n $$(expr $$(nproc) + 2) --maxprocesses 6 --dist loadfile --no-loadscope-reorder \
	-m "not ray and not engine and not browser and not kernel and not slow"
SOAK_GROUPS ?= 1000
QUESTIONS ?=

PY := .venv/bin/python
BUILD_MODELS = $(PY) -m workbench.models build smollm2-135m tiny tiny-moe
# The first Python that runs and is new enough; a name in the path may be a shim that only prints an error.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup models campaign test test-fast check fuzz soak bench lab clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 11

setup: ## environment and packages
	@if [ -z "$(PYTHON)" ]; then echo "set-up: no Python 3.11 to 3.14 found;" \
		"on Debian: apt-get install python3 python3-venv, or name one: make PYTHON=/path/to/python3" >&2; exit 2; fi
	@if ! "$(PYTHON)" -c "" 2>/dev/null; then echo "set-up: PYTHON=$(PYTHON) is no Python that runs;" \
		"name another one: make PYTHON=/path/to/python3" >&2; exit 2; fi
	@"$(PYTHON)" tools/set_up.py --extras "$(EXTRAS)"

models: setup ## the models, built once
	@$(BUILD_MODELS)

# A slip in the recipe is named before a model is downloaded.
campaign: setup ## one campaign [RECIPE=cpu_smoke] [ARGS="train.steps=2"]
	@$(PY) -m workbench.campaign.cli recipe show $(RECIPE) $(ARGS) >/dev/null
	@$(BUILD_MODELS)
	@$(PY) -m workbench.campaign.cli run $(RECIPE) $(ARGS)

test: models ## lint, types and all tests, those with Ray, engines and a browser too
	@$(PY) tools/chromium.py >/dev/null || true # where there is none, the tests that need one say so and fail
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-fast: models ## the tests that need no Ray, engine, kernel or browser and are not slow
	@$(FAST_TESTS) $(PYTEST_ARGS)

soak: models ## 20 minutes of scripted campaign, every part killed [SOAK_GROUPS=1000]
	@SOAK_DEADLINES=real SOAK_GROUPS=$(SOAK_GROUPS) $(PY) -m pytest tests/campaign/soak.py \
		tests/campaign/soak_resume.py tests/campaign/soak_learns.py tests/campaign/test_deaths.py --timeout 7200 $(PYTEST_ARGS)

check: models ## lint, types and the fast tests
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(FAST_TESTS) $(PYTEST_ARGS)

fuzz: models ## mutated ledgers, requests, receipts, envelopes [FUZZ_SECONDS=600]
	@FUZZ_SECONDS="$(FUZZ_SECONDS)" $(PY) -m pytest tests/fuzz --timeout 0 $(PYTEST_ARGS)

bench: models ## a quarter of an hour of benchmarks [QUESTIONS="verifier start_up"]
	@$(PY) -m benchmarks $(QUESTIONS)

lab: models ## JupyterLab on the notebooks [ARGS="--no-browser --port=8899"]
	@$(PY) -m workbench.campaign.cli lab $(ARGS)

clean: ## removes the environment and caches; keeps reports and models
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
