# kvstore. The two commands to know are `make demo` and `make test`. Each makes its own virtual
# environment; the machine needs python3 (3.11 or newer, with pip and venv) and make.

VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
# one more than the cores: tests of deadlines and servers mostly wait
TEST_WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

PY := $(VENV)/bin/python
INSTALL := sh requirements/install.sh $(VENV)

# Engines whose connectors are tested with the real thing, each in an environment of its own.
ENGINES ?= vllm aibrix lmcache
ENGINE_TESTS = $(addprefix tests/engines/,$(or $(TESTS_OF_$*),$*))
TESTS_OF_vllm := vllm sglang

.PHONY: help demo test test-engines soak fuzz servers lint format bench venv clean distclean

help:
	@echo 'make demo       a real model skips its prefill: compute, store, restart, restore (DEMO_ARGS=...)'
	@echo 'make test       every test, the short form of the demo included (PYTEST_ARGS=..., TEST_WORKERS=0)'
	@echo 'make test-engines connectors against real engines, vLLM for CPUs among them: 3.5 GB (ENGINES=...)'
	@echo 'make soak       the fault and endurance tests in their long form, about an hour (PYTEST_ARGS=...)'
	@echo 'make fuzz       everything that parses, guided by coverage: a minute a target (FUZZ_ARGS=--seconds 600)'
	@echo 'make servers    real S3 servers (SeaweedFS, rclone) for the tests that ask for one, 80 MB'
	@echo 'make lint       ruff, mypy --strict, import layers, file lengths'
	@echo 'make format     let ruff rewrite the sources'
	@echo 'make bench      benchmarks; each prints its machine and its baseline (BENCH_ARGS=...)'
	@echo 'make clean      remove caches and build outputs; make distclean the environments too'
	@echo 'VENV=DIR uses another environment, PYTHON=EXE makes it with another interpreter.'

demo: $(VENV)/.stamp-demo
	@$(PY) -m kvstore demo $(DEMO_ARGS)

test: $(VENV)/.stamp-dev
	@$(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-engines: $(ENGINES:%=test-engine-%)

# The engines' own warnings are theirs to mend. Their models are tiny: OpenMP's barriers would cost more than they save.
test-engine-%: .venv-%/.stamp-engine
	@echo "== $*"
	@OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		.venv-$*/bin/python -m pytest -o filterwarnings= -p no:cacheprovider $(ENGINE_TESTS) $(PYTEST_ARGS)

soak: $(VENV)/.stamp-dev
	@$(PY) -m pytest --soak -o timeout=5400 -o faulthandler_timeout=5000 tests/faults tests/stateful $(PYTEST_ARGS)

fuzz: $(VENV)/.stamp-dev
	@$(PY) tests/fuzz/run_atheris.py all $(or $(FUZZ_ARGS),--seconds 60)

servers: $(VENV)/.stamp-dev
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r requirements/servers.txt

lint: $(VENV)/.stamp-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/layers

format: $(VENV)/.stamp-dev
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

bench: $(VENV)/.stamp-dev
	@for script in benchmarks/bench_*.py; do \
		echo "== $$script"; $(PY) "$$script" $(BENCH_ARGS) || exit 1; done

venv: $(VENV)/.stamp-dev

# The stages build on each other; a stamp is as new as the last install that its inputs asked for.
$(VENV)/.stamp-torch: requirements/torch.txt requirements/install.sh
	@$(INSTALL) torch
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch pyproject.toml requirements/dev.txt requirements/model.txt
	@$(INSTALL) demo
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-demo
	@$(INSTALL) dev
	@touch $@

.PRECIOUS: .venv-%/.stamp-engine
.venv-%/.stamp-engine: requirements/torch.txt requirements/install.sh requirements/engines/common.txt
	@sh requirements/install.sh .venv-$* torch
	@sh requirements/install.sh .venv-$* $*
	@touch $@

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist demo-report
	find kvstore backends plugins tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
