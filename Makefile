# The README's two commands. Both set up a virtual environment first, and again only when the pins changed.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test test-all lint clean

demo: $(VENV)/ready
	$(VENV)/bin/ai-trains-ai demo $(ARGS)

test: $(VENV)/ready
	$(RUN) -m pytest -m "not slow" $(ARGS)

test-all: $(VENV)/ready
	$(RUN) -m pytest $(ARGS)

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ai-trains-ai needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,test,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
