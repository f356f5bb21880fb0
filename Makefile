# Every target works on a bare checkout: Python 3.12, git and make are enough.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venv-sglang
TRL := .venv-trl
UV = $(BIN)/uv
# A test process that dies ends the run: pytest-xdist would start another and then wait for ever.
AT_ONCE := -n 3 --dist loadscope --no-loadscope-reorder --max-worker-restart 0
STAMP := $(VENV)/.installed
SGLANG_STAMP := $(SGLANG)/.installed
TRL_STAMP := $(TRL)/.installed
export OMP_NUM_THREADS ?= 1
# Hosts that switch bytecode off would compile torch anew in every process.
export PYTHONDONTWRITEBYTECODE =

help: ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

quickstart: $(STAMP) ## train a small model on two cores: SFT, then GRPO; shows what it learned
	$(BIN)/rlrecipes train recipe=quickstart_sft
	$(BIN)/rlrecipes train recipe=quickstart
	@$(BIN)/python -m rlrecipes.cli.quickstart

test: $(STAMP) $(SGLANG_STAMP) ## static checks and all CPU tests (under 15 minutes on two cores; three at once, since they wait a lot)
	@$(MAKE) --no-print-directory -j 2 check coverage
	$(BIN)/pytest $(AT_ONCE) -m "not slow and not gpu"

test-full: check $(STAMP) $(SGLANG_STAMP) ## the same and the slow ones
	$(BIN)/pytest $(AT_ONCE) -m "not gpu"

test-gpu: $(STAMP) ## what needs a GPU
	$(BIN)/pytest -m gpu tests/gpu

coverage: $(STAMP) ## every line and branch of algos and batching is reached by their own tests
	$(BIN)/coverage run -m pytest -q --hypothesis-seed=0 tests/unit/algos tests/unit/batching tests/numerics/test_golden.py \
	  --ignore tests/unit/algos/test_algorithms_page.py
	$(BIN)/coverage report

mutation: $(STAMP) ## break algos in every small way; docs/mutation.md lists what no test can notice (ten minutes on two cores)
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

check: $(STAMP) ## lint, types, import rules, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@! find tests -name 'test_*.py' -printf '%f\n' | sort | uniq -d | grep . || { echo "two test files of one name: no process can import both"; exit 1; }
	$(BIN)/codespell rlrecipes conf docs benchmarks tools README.md CONTRIBUTING.md CHANGELOG.md

fmt: $(STAMP) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMP) ## make .venv from the lock

sglang: $(SGLANG_STAMP) ## make .venv-sglang, the real SGLang for CPU

debian: ## install what some tests use (as root): SLURM, Chromium, fish
	@{ command -v slurmctld || command -v /usr/sbin/slurmctld; } >/dev/null && command -v chromium fish >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    slurm-wlm slurmd slurmctld chromium fish; }

trl: $(TRL_STAMP) ## make .venv-trl, which benchmarks/grpo_speed.py runs against

docs: $(STAMP) ## write the generated pages of docs/
	$(BIN)/python -m rlrecipes.tracking.metrics > docs/metrics.md
	$(BIN)/python -m rlrecipes.config.reference > docs/config.md
	$(BIN)/python tools/algorithms.py
	$(BIN)/python tools/memory.py
	$(BIN)/python tools/recipes.py
	$(BIN)/python tools/rules.py

inventory: $(STAMP) $(SGLANG_STAMP) ## write the options of the pinned engines anew, after a change of versions
	for name in router megatron embedded reasoning_gym; do \
	  $(BIN)/python -W ignore tools/inventory.py $$name > rlrecipes/plan/inventories/$$name.json || exit 1; done
	CUDA_VISIBLE_DEVICES= SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=rlrecipes/engines/sglang/standins \
	  $(SGLANG)/bin/python -W ignore tools/inventory.py sglang > rlrecipes/plan/inventories/sglang.json

lock: $(STAMP) ## resolve requirements/*.in anew
	cd requirements && for pair in dev.in:lock.txt sglang-cpu.in:sglang-cpu.txt trl.in:trl.txt; do \
	  ../$(UV) pip compile -q --python-version 3.12 --generate-hashes --no-emit-index-url --no-header $${pair%:*} -o $${pair#*:}; done
	cd requirements && ../$(UV) pip compile -q --no-deps --python-version 3.12 --generate-hashes --no-emit-index-url --no-header sglang.in -o sglang.txt

$(VENV)/bin/uv: requirements/uv.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt

$(STAMP): requirements/lock.txt pyproject.toml $(VENV)/bin/uv
	$(UV) pip sync -q --python $(BIN)/python --require-hashes requirements/lock.txt
	$(UV) pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

$(SGLANG_STAMP): requirements/sglang-cpu.txt requirements/sglang.txt $(STAMP)
	$(UV) venv -q --allow-existing --python $(BIN)/python $(SGLANG)
	$(UV) pip install -q --python $(SGLANG)/bin/python --no-deps --require-hashes -r requirements/sglang-cpu.txt -r requirements/sglang.txt
	@touch $@

$(TRL_STAMP): requirements/trl.txt $(STAMP)
	$(UV) venv -q --allow-existing --python $(BIN)/python $(TRL)
	$(UV) pip install -q --python $(TRL)/bin/python --no-deps --require-hashes -r requirements/trl.txt
	@touch $@

.PHONY: help quickstart test test-full test-gpu coverage mutation check fmt setup sglang debian trl docs inventory lock
