# Two commands set everything up on a fresh machine: `make demo` and `make test`; `make quick` is for the working day.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo quick test lint docs reference snapshot clean

demo: .venv/installed
	$(BIN)/spr train catch --steps 2600 --set learner.learning_rate=0.0005 --out runs/demo --overwrite

quick: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest --quiet --numprocesses 2 --dist worksteal -m "not slow and not gpu"

test: .venv/installed-dev lint docs
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages as HTML, in build/docs; a warning, such as a broken link, is an error.
docs: .venv/installed-dev
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs

# The pages of docs/reference, from the code.
reference: .venv/installed-dev
	$(BIN)/python docs/reference.py

# After a change of numbers that is meant: what this version computes becomes what tests/doors/test_snapshot.py expects.
snapshot: .venv/installed-dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/doors/snapshot.py

# Made only where it is missing, so that both targets below share one environment.
.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

# First every package whose files have known hashes; then PyTorch, which every index has in a file of its own, and this project, with the
# setuptools that were just checked. pip can't do both at once: it has no hash for a folder.
.venv/installed: pyproject.toml constraints.txt requirements/run.txt | .venv/bin/python
	$(INSTALL) --no-deps --require-hashes --requirement requirements/run.txt
	$(INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[report,video]'
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt requirements/run.txt requirements/dev.txt | .venv/bin/python
	$(INSTALL) --no-deps --require-hashes --requirement requirements/dev.txt
	$(INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
