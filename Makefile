# `make demo` and `make test` do everything on a fresh machine: they set up `.venv` first if it is not there.
PYTHON ?= python3
BIN := .venv/bin
PINS ?= -c constraints.txt  # `make test PINS=` tries the newest torch and torchvision, in a fresh .venv
STAMP := .venv/.unstride-installed

.PHONY: setup test test-slow demo bench coverage docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "unstride needs python3 >= 3.11, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PINS) torch torchvision
	$(BIN)/python -m pip install --quiet $(PINS) -e '.[dev]'
	touch $(STAMP)

test: setup
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal  # two processes with several threads each wait for each other

# thousands of random networks, whole zoos, long fits
test-slow: setup
	$(BIN)/pytest -q -m slow

demo: setup
	$(BIN)/unstride demo

# every architecture of the zoos against the laws; writes docs/coverage.md
coverage: setup
	$(BIN)/python -m benchmarks.coverage

# speed of the engine against the eager model
bench: setup
	$(BIN)/python -m benchmarks.engine_speed

docs: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site
