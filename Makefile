# make demo | make test | make setup; slow things have targets of their own.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test lint types soak bench clean

setup: $(READY)

# torch first and exactly: a range would let pip choose another build with gigabytes of CUDA.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/holdfast demo

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# A longer random soak: make soak SCENARIOS=200
SCENARIOS ?= 30
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults/test_outside.py -k random --soak $(SCENARIOS) --timeout 7200

bench: setup
	$(BIN)/holdfast bench overhead
	$(BIN)/holdfast bench recovery

clean:
	rm -rf .venv .bench holdfast-logs holdfast-demo
