# Headrace. `make run` is all that is needed to try it; nothing here needs root.

PYTHON   ?= python3
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
PORT     ?= 3000
ARGS     ?=
SHELL    := /bin/sh

# An active virtual environment is used; without one, .venv is made. The system's own Python is never installed into.
VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
BIN  := $(VENV)/bin
TORCH_STAMP := $(VENV)/.headrace-$(subst /,_,$(subst =,-,$(TORCH)))
PIP  := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
PROTO := proto/headrace/v1/generation.proto
GENERATED := proto/headrace/v1/generation_pb2_grpc.py

.DEFAULT_GOAL := help
.PHONY: help install proto run chat test test-kernels test-cuda judges test-failures soak test-image lint bench bench-peers clean

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \2/p' Makefile | awk '{ t = $$2; $$1 = $$2 = ""; printf "  make %-12s%s\n", t, $$0 }'
	@echo
	@echo "  settings: PYTHON=$(PYTHON) TORCH='$(TORCH)' PIP_ARGS='$(PIP_ARGS)'   (install)"
	@echo "            PORT=$(PORT) ARGS='--model-id ...'              (run)"

install: $(VENV)/.headrace-model ## make .venv with everything in it and fetch the default model
	@echo "Installed. Start the server with:"
	@echo "  $(BIN)/headrace serve"

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 or later, or say PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) is too old: install Python 3.11 or later, or say PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module: install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@rm -rf .venv
	$(PYTHON) -m venv .venv

# One stamp a step, in the environment itself, so that a second install has nothing to do.
$(TORCH_STAMP): | $(VENV)/bin/python
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: the Python of $(VENV) is too old: 3.11 or later is needed" >&2; exit 1; }
	@echo "Installing $(TORCH). The default build for Linux brings CUDA: about 3 GB to download, 6 GB on disk."
	@echo "For the CPU build (about 200 MB): make install PIP_ARGS='...' with pip's options for it,"
	@echo "or TORCH= a wheel file of it. See https://pytorch.org/get-started/locally for both."
	$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.headrace-project: $(TORCH_STAMP) pyproject.toml hatch_build.py proto/headrace/__init__.py
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  echo "note: no C++ compiler found; kernels of our own are left out (Debian: apt install g++)"
	$(PIP) -e '.[dev]'
	@touch $@ $(GENERATED)

$(VENV)/.headrace-model: $(VENV)/.headrace-project
	$(BIN)/headrace resolve
	@touch $@

$(GENERATED): $(PROTO) $(VENV)/.headrace-project
	$(BIN)/python hatch_build.py
	@touch $@

proto: $(GENERATED) ## generate the gRPC code again

run: $(VENV)/.headrace-model $(GENERATED) ## serve the default model on PORT
	PORT=$(PORT) exec $(BIN)/headrace serve $(ARGS)

chat: $(VENV)/.headrace-project ## talk to the server that runs on PORT
	@PORT=$(PORT) $(BIN)/headrace chat $(ARGS)

lint: $(VENV)/.headrace-project $(GENERATED) ## ruff and mypy over the tree
	$(BIN)/ruff check .
	$(BIN)/mypy hatch_build.py proto launcher router shard tests bench examples

test: $(VENV)/.headrace-model $(GENERATED) lint ## lint, then the test suite
	$(BIN)/python -m pytest $(ARGS)

test-kernels: $(VENV)/.headrace-model $(GENERATED) ## the CPU kernels: a hundred times as many shapes, and the sanitizers (2 min)
	HEADRACE_TEST_FUZZ=100 $(BIN)/python -m pytest tests/kernels tests/unit/shard/test_kernels.py -m "kernels or not kernels" $(ARGS)

test-cuda: $(VENV)/.headrace-model $(GENERATED) ## what needs a GPU, on a machine that has one (1 min)
	$(BIN)/python -m pytest tests/cuda -m cuda -rs $(ARGS)

test-failures: $(VENV)/.headrace-model $(GENERATED) ## every row of the failure matrix (some minutes)
	$(BIN)/python -m pytest tests/failures -m "failures or not failures" -s $(ARGS)

soak: $(VENV)/.headrace-project $(GENERATED) ## 100,000 short requests with random cancels (ARGS='--requests N'): nothing leaks
	$(BIN)/python tests/soak.py $(ARGS)

test-image: $(VENV)/.headrace-project ## run the Dockerfile's steps in a fresh environment
	$(BIN)/python tests/image.py

judges: $(VENV)/.headrace-model $(GENERATED) ## client libraries of others against the service (some minutes)
	HEADRACE_WRITE_VERDICTS=1 $(BIN)/python -m pytest tests/judges -m "judges or not judges" -s $(ARGS)

bench: $(VENV)/.headrace-model $(GENERATED) ## measure, and compare with bench/results
	$(BIN)/python -m bench $(ARGS)

bench-peers: $(VENV)/.headrace-model $(GENERATED) ## measure beside llama.cpp, OpenVINO, vLLM and others
	PIP_ARGS='$(PIP_ARGS)' TORCH='$(TORCH)' $(BIN)/python -m bench peers $(ARGS)

clean: ## remove what was built; .venv stays
	rm -f shard/headrace_shard/kernels/*.so
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f proto/headrace/v1/*_pb2.py proto/headrace/v1/*_pb2.pyi proto/headrace/v1/*_pb2_grpc.py proto/headrace/v1/*_pb2_grpc.pyi
	find proto launcher router shard tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
