# Everything from a fresh clone, with Python (3.10 or newer), pip and make on the machine.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= launch/configs/single.yaml
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench dist clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'
	@echo "  PYTHON=python3.12 picks another Python, VENV=folder another place, ARGS='…' goes to the recipe or pytest"

# accelerate gives a process one CPU thread unless this is set; without a GPU all of them are wanted.
demo: export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
# Threads that wait spin for a moment, then sleep: longer, they take the cores from other programs.
demo: export GOMP_SPINCOUNT ?= 10000
# resume=auto: a second call goes on where the first was stopped, or shows the finished run again.
demo: $(VENV)/demo.stamp  ## pretrain on the embedded images and show what was learned (about five minutes on 2 CPU cores)
	$(VENV)/bin/accelerate launch --config_file $(CONFIG) recipes/dino_xcit.py resume=auto $(ARGS)

test: $(VENV)/test.stamp  ## run all tests
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(ARGS)

test-fast: $(VENV)/test.stamp  ## run the tests that take about a second at most
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m "not slow" $(ARGS)

lint: $(VENV)/test.stamp  ## check style, types and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python .ci/import_contract.py

bench: $(VENV)/test.stamp  ## compare with lightly, timm, torchvision and faiss side by side; figures go to bench.json
	$(VENV)/bin/python benchmarks/bench.py --json bench.json $(ARGS)

dist: $(VENV)/test.stamp  ## build the source archive and the wheel into dist/
	rm -rf build dist  # a module deleted since would come back from build/
	$(VENV)/bin/python -m build
	rm -rf build

clean:  ## delete what was built, the virtual environment included
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Editable, so that the checkout is what runs; the stamp spares a second installation.
$(VENV)/%.stamp: setup.cfg setup.py pyproject.toml $(wildcard backbones/native/* ssl/*/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "nestling needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[$*]'
	@touch $@
