# Everything starts from a fresh clone: each target makes its own .venv first.
#
#   make demo    train on two ranks, kill one, resume, and show that nothing was lost (under 2 minutes)
#   make test    style, types, import arrows and all tests
#   make lint    the same without the tests
#   make bench   save and load against torch.distributed.checkpoint and the machine's own floors
#   make clean   remove what the targets above made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Two at a time suits the smallest machine this is meant for; more cores: make test WORKERS=8
WORKERS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := test
.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/python -m trainer.demo

test: lint
	@echo "== tests"
	$(BIN)/python -m pytest -n $(WORKERS) --durations=15
	@echo "make test: style, types, import arrows and every test above hold."

lint: $(READY)
	@echo "== style"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== types"
	$(BIN)/mypy
	@echo "== import arrows"
	$(BIN)/lint-imports

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 benchmarks/save_load.py --quick --check

# The stamp is as old as the installation: editing either file installs again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	@echo "== installing into $(VENV) (once; most of it is torch)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) bench-out demo-out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
