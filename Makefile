# make demo | make test | make docs | make setup; slow things have targets of their own.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test pytest lint types soak thorough formats test-formats test-study test-torch docs bench clean

setup: $(READY)

# torch first and exactly: a range would let pip choose another build with gigabytes of CUDA.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/holdfast demo
	@echo 'with kills of your own, in a browser: $(BIN)/holdfast demo --watch'

# Three processes at once on two cores: the tests of real processes wait a good part of their time.
STREAMS ?= 3
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types pytest

# `make test` has it beside mypy, which needs one core for half a minute.
pytest: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(STREAMS) --dist worksteal --durations 20

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Random histories of the simulated world, then a soak of real processes: make soak SCENARIOS=5000 PROCESSES=200
# Each ends with how many faults of which kind were injected: about 13 in each history of the world, 3 in each real run.
# One history again, with all its events if it fails: pytest tests/world --history 1234
SCENARIOS ?= 2000
TIDY := -o tmp_path_retention_policy=failed
PROCESSES ?= 30
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/world -k "every_history or a_crowd" --soak $(SCENARIOS) --timeout 7200 $(TIDY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -k random --soak $(PROCESSES) --timeout 7200 $(TIDY)

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

# The site: site/index.html. Its search needs a server: python3 -m http.server -d site
DOCS := .venv/docs-ready
docs: setup $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'site/index.html is made; its search needs a server: python3 -m http.server --bind 127.0.0.1 -d site'

$(DOCS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $(DOCS)

# Another torch, in a venv of its own under .bench/: make test-torch VERSION=2.13.0
# Only a CPU build is taken, unless BUILD=cuda. docs/dependencies.md says which versions are green.
VERSION ?= 2.13.0
BUILD ?= cpu
test-torch: setup
	$(BIN)/python tests/torch_versions.py $(VERSION) --build $(BUILD)

RACES := overhead recovery checkpoint zero planner pipeline data log replay undo scale sync failover teams ray store
bench: setup formats
	for race in $(RACES); do $(BIN)/python -m bench $$race || exit 1; done

clean:
	rm -rf .venv .bench .study site holdfast-logs holdfast-demo holdfast-study
