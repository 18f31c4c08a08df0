# make demo: compile a real training script to a proven schedule. make test: lint, types and tests.
# Each sets up its own virtual environment from nothing but Python 3.11.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
# Each test starts processes, and each would compile the package anew where the environment forbids to keep that.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test suite lint types docs dist nightly matrix integrations gpu artifacts notebooks clean

demo: $(INSTALLED)
	$(BIN)/checkflow demo

# mypy has the core that the suite leaves while it waits for processes and disks.
test: $(READY)
	$(MAKE) --no-print-directory --jobs=2 lint types suite

# Three workers on two cores: tests wait for processes and disks. Who has done its own takes over others';
# tests/conftest.py has the longest first.
suite: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The site, into build/site. Nothing is fetched; a warning is an error. The tests build it too.
docs: $(READY)
	$(BIN)/mkdocs build --strict

# Wheel and sdist, into dist, as they are published; TAG, where there is one, has to name their version.
dist: $(READY)
	test -z '$(TAG)' || grep -q "^version = \"$(patsubst v%,%,$(TAG))\"$$" pyproject.toml
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m pytest -n 0 tests/test_distribution.py

nightly: $(READY)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n 2 --dist worksteal

# A sample of the suite under other Pythons and torches: make matrix CELLS="3.11/2.9 3.12/2.13", or all of them.
matrix:
	$(PYTHON) tests/matrix.py $(CELLS)

# Each integration's tests, with its framework at the oldest version that is supported and the newest.
integrations:
	$(PYTHON) tests/matrix.py --frameworks

# What only a machine with a CUDA device can show, in nine minutes: a JSON and a table in benchmarks/reports.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

# The traced graphs and compiled schedules that the repository carries.
artifacts: $(READY)
	for network in alexnet bert mnasnet resnet resnet3d transformer vgg vit; do for batch in 1 32; do \
	    name=$$network-$$batch.json; \
	    $(BIN)/checkflow trace $$network --batch-size $$batch -o graphs/$$name && \
	    $(BIN)/checkflow compile graphs/$$name --bandwidth 63GB/s --interval auto -o schedules/$$name || exit 1; \
	done; done

# Execute every notebook from a clean kernel and write it with its outputs.
notebooks: $(READY)
	$(BIN)/python notebooks/execute.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "checkflow needs Python 3.11 or later"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(READY): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
