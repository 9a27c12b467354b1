# Everything starts from a fresh clone: each target makes its own .venv first.
#
#   make demo    train on two ranks, kill one, resume, and show that nothing was lost (under 2 minutes)
#   make test    style, types, import arrows and all tests
#   make ranks   a rank dead, stopped, raising or hanging at each moment of save and load: the others say who
#   make damage  every damage to every file of a step: found, never loaded, repaired
#   make kill-points   every operation killed at every kill point, power cuts, 50 kills of a 2-rank run (about 10 minutes)
#   make lint    the same without the tests
#   make fuzz    each parser of hostile input, 1,000,000 coverage-guided executions (about 30 minutes on one core)
#   make bench   save and load against torch.distributed.checkpoint and the machine's own floors
#   make soak    ten minutes of saves to failing storage by two ranks that are killed at random
#   make clean   remove what the targets above made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Two at a time suits the smallest machine this is meant for; more cores: make test WORKERS=8
WORKERS ?= 2

# A shorter soak: make soak MINUTES=1
MINUTES ?= 10

# Fewer for a first look: make fuzz EXECUTIONS=10000
EXECUTIONS ?= 1000000

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := test
.PHONY: demo fuzz test damage kill-points ranks lint bench soak clean

demo: $(READY)
	$(BIN)/python -m trainer.demo

test: lint
	@echo "== tests"
	$(BIN)/python -m pytest -n $(WORKERS) --durations=15
	@echo "make test: style, types, import arrows and every test above hold."

ranks: $(READY)
	CKPT_RANK_FAILURES=all $(BIN)/python -m pytest -n $(WORKERS) tests/distributed/test_rank_failure.py

damage: $(READY)
	CKPT_DAMAGE=all $(BIN)/python -m pytest -n $(WORKERS) tests/damage

kill-points: $(READY)
	@mkdir -p kill-points-out
	CKPT_KILL_POINTS=all CKPT_KILL_POINTS_REPORT=kill-points-out/points.txt $(BIN)/python -m pytest -n 0 -s -v \
		tests/crash/test_kill_points.py tests/crash/test_power_cut.py tests/crash/test_random_kills.py
	@echo "make kill-points: the points and what came of each are in kill-points-out/points.txt"

fuzz: $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --executions $(EXECUTIONS)

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

soak: $(READY)
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

# The stamp is as old as the installation: editing either file installs again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	@echo "== installing into $(VENV) (once; most of it is torch)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) bench-out demo-out fuzz-out kill-points-out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
