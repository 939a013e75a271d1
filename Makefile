# Every way to build, run and check the product. `make help` lists them. Needs Python 3.11+, make and git;
# `make cluster` and the end-to-end tests need root on Linux, Go and apt as well.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS ?= runs
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE  # compiling torch, diffusers and peft anew costs each process ten seconds

# a runner without internet would wait in vain for a download: the cluster is built from source there
ifdef CI
export LORA_CLUSTER_DOWNLOAD_BASE ?= off
endif

.DEFAULT_GOAL := help
.PHONY: help run test test-fast test-unit test-trainer test-integration test-e2e lint format generate verify cluster \
        cluster-down images bench bench-trainer lock clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

$(READY): requirements/dev.txt requirements/bootstrap.txt pyproject.toml
	@echo "Installing into $(VENV) ..."
	@test -x $(BIN)/uv || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	@$(BIN)/uv pip sync -q --python $(BIN)/python --require-hashes requirements/dev.txt
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

run: $(READY) ## Train a small LoRA on real photographs on this machine: preempted once, resumed, exported
	@$(BIN)/python examples/quickstart/prepare.py
	@$(BIN)/lora-operator run examples/quickstart/job.yaml --store $(RUNS) --preempt-at 50

test: $(READY) ## Everything: lint, verify, unit, contract, trainer, integration, end-to-end on a real cluster
	@$(MAKE) --no-print-directory lint verify
	@$(MAKE) --no-print-directory test-unit
	@$(MAKE) --no-print-directory test-trainer
	@$(MAKE) --no-print-directory test-integration
	@$(MAKE) --no-print-directory test-e2e

test-fast: test-unit ## Unit and contract tests: under a minute

test-unit: $(READY)
	$(BIN)/pytest -q -n auto --dist loadfile tests/unit tests/contract

test-trainer: $(READY) ## The trainer on tiny models of the real architectures
	$(BIN)/pytest -q -n auto --dist loadfile tests/trainer

test-integration: $(READY) ## Against a real API server, a real S3 server and real processes
	$(BIN)/pytest -q tests/integration

test-e2e: $(READY) ## On a real cluster with the real images, chart and S3 (root on Linux)
	$(BIN)/pytest -q tests/e2e

lint: $(READY) ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY) ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(READY) ## Write CRDs and the reference page from the types
	$(BIN)/python -m lora_api generate

verify: $(READY) ## Fail when generated files are not what the types say
	$(BIN)/python -m lora_api verify

cluster: $(READY) ## Kubernetes and S3 on this machine, with the operator installed (root on Linux)
	@$(BIN)/python examples/quickstart/prepare.py
	@$(BIN)/python -m tests.cluster up --gpus 1
	@$(BIN)/python -m tests.cluster install --data examples/quickstart/build

cluster-down: $(READY) ## Stop it; nothing stays but the cache
	$(BIN)/python -m tests.cluster down

images: $(READY) ## Build both images (root on Linux)
	$(BIN)/python -m tests.cluster images

bench: bench-trainer ## Every benchmark: the trainer's, and submit-to-pod over a plain Job's (root on Linux)
	$(BIN)/python benchmarks/submit_latency.py --own-cluster

bench-trainer: $(READY) ## Loop over its bare floor at three sizes, caching, memory, start-up, saving
	$(BIN)/python benchmarks/trainer_loop.py
	$(BIN)/python benchmarks/trainer_around.py
	$(BIN)/python benchmarks/save_stall.py

lock: $(READY) ## Resolve the pinned requirement files anew
	@for target in "dev --extra operator --extra trainer --group dev" "operator --extra operator -c requirements/dev.txt" \
	  "trainer --extra trainer -c requirements/dev.txt" bootstrap; do \
	  set -- $$target; name=$$1; shift; \
	  if [ $$name = bootstrap ]; then set -- --group bootstrap -c requirements/dev.txt; source=; else source=pyproject.toml; fi; \
	  $(BIN)/uv pip compile -q $$source "$$@" --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	    --generate-hashes --no-header --no-emit-index-url -o requirements/$$name.txt || exit 1; done

clean: ## Remove what was built here, not the cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache $(RUNS)
