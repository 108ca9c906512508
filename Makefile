# make demo   set up and show what there is        make test   set up and check everything
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint test-all docs bench compare parity experiments clean

demo: $(VENV)/installed
	$(BIN)/stageline demo

# Style and types are checked beside the tests, whose workers have one thread each: three of them on
# two cores take 277 s, with two threads each 293 s. What measures times runs last.
TIMED := tests/test_measured_times.py
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
test: $(VENV)/installed-dev
	@($(LINT)) > $(VENV)/lint.log 2>&1 & lint=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist worksteal -m "not slow" --ignore $(TIMED); tests=$$?; \
	wait $$lint; linted=$$?; cat $(VENV)/lint.log; exit $$((tests + linted))
	$(BIN)/pytest -q $(TIMED)

lint: $(VENV)/installed-dev
	$(LINT)

# With those that take long: a quarter of an hour.
test-all: test
	$(BIN)/pytest -q -n 3 --dist worksteal -m slow

# The site, in docs/_build: every warning is an error, broken links and unknown names among them.
docs: $(VENV)/installed-docs
	$(BIN)/sphinx-build --nitpicky --fail-on-warning --keep-going --quiet -b html docs docs/_build
	@echo "open docs/_build/index.html"

# Tables and pictures of benchmarks/, about a minute; nothing else should run meanwhile.
bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/zero_bubble_rates.py
	$(BIN)/python benchmarks/speed.py

# Stageline beside its peers: hours, on a machine where nothing else runs. An interrupted run goes on
# where it was; cells that are in benchmarks/compare/results.json are not measured again.
compare: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.compare all

# Every model, schedule, backend, number of ranks and recomputation against a plain loop: a quarter
# of an hour.
parity: $(VENV)/installed-dev
	$(BIN)/python benchmarks/parity.py

# GPipe's own experiments: hours on two cores. An interrupted one goes on where it was; results that
# are in experiments/*/results.json are not made again.
experiments: $(VENV)/installed-dev
	$(BIN)/python -m experiments.tables all
	$(BIN)/python -m experiments.images all
	$(BIN)/python -m experiments.translation all

clean:
	rm -rf $(VENV) demo docs/_build docs/_pages .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamps: what is installed is installed again only when its list has changed.
$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two, most of it PyTorch"
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP_INSTALL) --editable ".[docs]"
	touch $@
