# make train | test | lint | clean: each makes or updates .venv first and needs only a Python.
PYTHON ?= python3
VENV   ?= .venv
RECIPE ?= llama_stdlib
ARGS   ?=
PYTEST  = $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# Several workers that each compile the whole library before their first test take minutes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help train test test-quick test-all costs breaks lint clean

help:
	@echo "make train   train a language model on Python's own standard library (runs/001, runs/002, ...)"
	@echo "make test    run the core of the tests: some minutes, every file of them represented"
	@echo "make test-quick  the same and what is dearer; make test-all  everything, two hours"
	@echo "make costs   measure what tests cost, which decides what is in the core"
	@echo "make breaks  break the package on purpose, see that tests notice"
	@echo "make lint    check format, lint, types and which room imports which"
	@echo "make clean   delete $(VENV) and caches, never runs/"
	@echo "PYTHON=python3.12 picks the Python; RECIPE=llama_tiny another recipe;"
	@echo "ARGS='--steps 100' goes to colossax train, ARGS='-k rules' to pytest"

train:
	@$(PYTHON) ci/environment.py $(VENV)
	@n=1; while [ -e "runs/$$(printf %03d $$n)" ]; do n=$$((n + 1)); done; \
	exec $(VENV)/bin/colossax train $(RECIPE) --out "runs/$$(printf %03d $$n)" $(ARGS)

test:
	@$(PYTHON) ci/environment.py $(VENV) --extra dev
	$(PYTEST) --core $(ARGS)

test-quick:
	@$(PYTHON) ci/environment.py $(VENV) --extra dev
	$(PYTEST) $(ARGS)

test-all:
	bash .ci/run all

costs:
	@$(PYTHON) ci/environment.py $(VENV) --extra dev
	$(PYTEST) --renew-costs $(ARGS)

breaks:
	@$(PYTHON) ci/environment.py $(VENV) --extra dev
	$(VENV)/bin/python ci/breaks.py $(ARGS)

lint:
	@$(PYTHON) ci/environment.py $(VENV) --extra dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyrefly check
	$(VENV)/bin/lint-imports --no-logo

clean:
	rm -rf $(VENV) $(VENV).log .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf build dist colossax.egg-info
	find colossax tests bench ci -name __pycache__ -type d -prune -exec rm -rf {} +
