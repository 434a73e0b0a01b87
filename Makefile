# `make demo` and `make test` do everything on a fresh machine: they set up `.venv` first if it is not there.
PYTHON ?= python3
BIN := .venv/bin
PINS ?= -c constraints.txt  # `make test PINS=` tries the newest torch and torchvision, in a fresh .venv
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PINS)  # errors only, no warnings
STAMP := .venv/.unstride-installed

.PHONY: setup test test-slow demo bench coverage docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "unstride needs python3 >= 3.11, this is " + sys.version.split()[0])'
	@echo "set-up, once: PyTorch and about 160 other packages in .venv, 2.6 GB (more where pip brings CUDA), 3 to 15 minutes"
	@echo "set-up 1 of 3: .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "set-up 2 of 3: torch and torchvision"
	@$(PIP) torch torchvision
	@echo "set-up 3 of 3: unstride, and what its demo and its tests need"
	@$(PIP) -e '.[dev]'
	@touch $(STAMP)

test: setup
	@echo "lint, format, types, layers"
	@$(BIN)/ruff check --quiet src tests benchmarks examples
	@$(BIN)/ruff format --quiet --check src tests benchmarks examples
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > .venv/lint-imports.txt || { cat .venv/lint-imports.txt; exit 1; }
	@echo "tests, about 8 minutes on two cores"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal  # two processes with several threads each wait for each other

# thousands of random networks, whole zoos, long fits
test-slow: setup
	@$(BIN)/pytest -q -m slow

demo: setup
	@$(BIN)/unstride demo

# every architecture of the zoos against the invariants; writes docs/results/coverage.md
coverage: setup
	@$(BIN)/python -m benchmarks.coverage

# speed of the engine against the eager model
bench: setup
	@$(BIN)/python -m benchmarks.engine_speed

docs: setup
	@$(BIN)/mkdocs build --strict --quiet

clean:
	@rm -rf .venv build dist site
