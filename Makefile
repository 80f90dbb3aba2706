# make train | test | breaks | lint | clean: each makes or updates .venv first and needs only a Python.
PYTHON ?= python3
VENV   ?= .venv
RECIPE ?= llama_stdlib
ARGS   ?=

.PHONY: help train test breaks lint clean

help:
	@echo "make train   train a language model on Python's own standard library (runs/001, runs/002, ...)"
	@echo "make test    run the tests"
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
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 $(ARGS)

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
