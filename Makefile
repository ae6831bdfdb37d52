# make demo | make test | make setup; slow things have targets of their own.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test lint types soak thorough formats test-formats test-study bench clean

setup: $(READY)

# torch first and exactly: a range would let pip choose another build with gigabytes of CUDA.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/holdfast demo

# Three processes at once on two cores: the tests of real processes wait a good part of their time.
STREAMS ?= 3
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(STREAMS) --dist worksteal --durations 20

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Random histories of the simulated world, then a soak of real processes: make soak SCENARIOS=5000 PROCESSES=200
# One history again, with all its events if it fails: pytest tests/world --history 1234
SCENARIOS ?= 2000
PROCESSES ?= 30
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/world/test_histories.py -k every_history --soak $(SCENARIOS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -k random --soak $(PROCESSES) --timeout 7200

# All tests, with every case of the sweeps. `pytest -rs` lists what `make test` leaves out, and what covers it there.
thorough: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --soak 10 --timeout 1200

# DeepSpeed, Megatron and transformers themselves, as judges of what we read and write; in a venv of their own.
FORMATS := .bench/formats
formats: $(FORMATS)/ready

$(FORMATS)/ready:
	$(PYTHON) -m venv $(FORMATS)
	$(FORMATS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy setuptools wheel
	DS_BUILD_OPS=0 $(FORMATS)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation \
		deepspeed==0.19.8 megatron-core==0.16.1 transformers==5.22.2 safetensors==0.8.0
	touch $(FORMATS)/ready

test-formats: setup formats
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/formats

# The study's adapters, each in its framework's venv under .study/ (made on first use: 4 GB in all).
test-study: setup
	$(BIN)/python -m holdfast.study.install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/study

RACES := overhead recovery checkpoint zero planner pipeline log replay undo sync
bench: setup formats
	for race in $(RACES); do $(BIN)/python -m bench $$race || exit 1; done

clean:
	rm -rf .venv .bench .study holdfast-logs holdfast-demo holdfast-study
