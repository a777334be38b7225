# Everything from nothing: the first target that needs Python makes .venv and installs into it, once.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install bench tune test test-fast test-nightly benchmarks gpu gpu-bundle tiny smollm2 report claims wandb-compare docs readme-figures lint clean

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTHONS := python3.13 python3.12 python3.11 python3
SUITABLE := import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))

METHOD ?= kangaroo
LIMIT ?= 2
THREADS ?= 1
# Given again, a sweep of the claims measures what it lacks. Acceptance lengths need neither repeats nor a quiet machine.
CLAIM = $(PY) -m specbench run -m runs_root=runs/claims rerun=false threads=$(THREADS)
SOME = $(CLAIM) data.limit=$(LIMIT) decoding.max_new_tokens=64
ON_REAL = settings=published pair=smollm2-135m data=spec_bench generate=false
REAL = $(CLAIM) $(ON_REAL) data.limit=$(LIMIT)
LENGTHS = repeats=1 remeasure=0
UNTIMED = $(SOME) generate=false $(LENGTHS)
DRAWN = $(UNTIMED) decoding=sample
# A violation or a failed question (exit code 1) does not keep the table from being made.
GOES_ON = || [ $$? -eq 1 ]
BATCHES = $(CLAIM) experiment=batch_scaling data.limit=3 decoding.max_new_tokens=32 repeats=3
OF_TINY = pair=tiny_wide,tiny generate=false
TINY := build/tiny
EVERY := not nightly
FAST := $(EVERY) and not slow and not process and not cluster and not browser and not cuda and not longer
# Byte code of tests, kept where `make clean` finds it: without it each process compiles 300 modules anew.
PYTEST = unset PYTHONDONTWRITEBYTECODE; PYTHONPYCACHEPREFIX='$(CURDIR)/build/pycache' $(PY) -m pytest -n auto --dist worksteal

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Make .venv and install into it: . .venv/bin/activate gives the command specbench

bench: $(STAMP) ## Measure a method: METHOD=kangaroo [DRAFTER=sps PAIR=tiny DATA=tiny TASK=all ARGS="key=value ..."]
	@$(PY) -m specbench run method=$(METHOD) $(if $(DRAFTER),drafter=$(DRAFTER)) $(if $(PAIR),pair=$(PAIR)) $(if $(DATA),data=$(DATA)) \
		$(if $(TASK),task=$(TASK)) $(ARGS)

tune: $(STAMP) ## Find a method's draft length and thresholds for a pair, here: METHOD=kangaroo [PAIR=tiny ARGS="trials=20 ..."]
	@$(PY) -m specbench tune method=$(METHOD) $(if $(PAIR),pair=$(PAIR)) $(if $(DATA),data=$(DATA)) $(if $(TASK),task=$(TASK)) $(ARGS)

test: $(STAMP) ## Run the fast tests and every twelfth of the slow ones, in four to nine minutes on two cores; SPECBENCH_TURN=1 takes others, =all all [ARGS="-k name"]
	@$(PYTEST) -m "$(EVERY)" $(ARGS)

test-fast: $(STAMP) ## Run the tests that need neither a fifth of a second nor other processes, in a minute or two [ARGS="-k name"]
	@$(PYTEST) -m "$(FAST)" $(ARGS)

test-nightly: $(STAMP) ## Run all tests, also of stored weights, compilers and simulations [ARGS="-k name"]
	@$(PYTEST) $(ARGS)

benchmarks: $(STAMP) ## Run the timed comparisons of tests/benchmarks (best on an idle machine)
	@$(PY) -m tests.benchmarks.decoding $(ARGS)
	@$(PY) -m tests.benchmarks.batching $(ARGS)

gpu: $(STAMP) ## Check a GPU in ten minutes: build/gpu/report.md; again: what was left out [ARGS="--parts expanded --methods sps"; without .venv: python3 -m tests.benchmarks.gpu]
	@$(PY) -m tests.benchmarks.gpu $(ARGS)

gpu-bundle: $(STAMP) ## Fetch into build/gpu-bundle the wheels that a machine with torch and transformers alone lacks [ARGS="--have FILE"]
	@$(PY) -m tests.benchmarks.gpu.bundle $(ARGS)

tiny: $(STAMP) ## Train the embedded family again, from nothing, into build/tiny; continues where it was stopped
	@$(PY) -m methods.family --out $(TINY) $(ARGS)

smollm2: $(STAMP) ## Let SmolLM2-135M write conversations and train every method's parts on them, into build/smollm2-135m; continues where it was stopped [ARGS="tokens=100000 steps=100"]
	@$(PY) -m specbench parts pair=smollm2-135m $(ARGS)

report: $(STAMP) ## Tables, plots and a page of the run folders in runs/ [RUNS="FOLDER ..."]
	@$(PY) -m specbench.report $(RUNS) $(ARGS)

claims: $(STAMP) ## Check what the papers claim on a real model and on small ones, in two to three hours; continues where it was stopped [LIMIT=2 questions per task, THREADS=1, ARGS="key=value ..."]
	@$(REAL) method=kangaroo,kangaroo_tree,medusa,sps,vocabtrim,mirror_sd $(ARGS) $(GOES_ON)
	@$(REAL) $(LENGTHS) method=hydra_heads,eagle,eagle2,eagle3,samd_eagle2 $(ARGS) $(GOES_ON)
	@$(SOME) experiment=kangaroo settings=published method=kangaroo pair=tiny_wide,tiny $(ARGS) $(GOES_ON)
	@$(SOME) experiment=kangaroo settings=published,tuned method=kangaroo_tree,medusa pair=tiny_wide,tiny generate=false $(ARGS) $(GOES_ON)
	@$(UNTIMED) experiment=spec_bench_board settings=published method=medusa,hydra_heads,eagle,eagle2,eagle3,samd_eagle2 pair=tiny $(ARGS) $(GOES_ON)
	@$(DRAWN) settings=published method=dflash,dspark pair=tiny $(ARGS) $(GOES_ON)
	@$(DRAWN) settings=published method=eagle3 method.nodes=7 method.width=1 method.max_draft_tokens=7 pair=tiny $(ARGS) $(GOES_ON)
	@$(SOME) experiment=vocab_trim settings=published pair=tiny_wide_draft,tiny generate=false $(ARGS) $(GOES_ON)
	@$(SOME) experiment=s2d_multi_target settings=published pair=tiny_wide,tiny_shallow_wide,tiny,tiny_shallow generate=false $(ARGS) $(GOES_ON)
	@$(SOME) experiment=mirror_sd settings=published method=sps,sps_ss,mirror_sd pair=tiny_wide,tiny generate=false $(ARGS) $(GOES_ON)
	@$(SOME) experiment=mirror_sd settings=tuned method=mirror_hybrid pair=tiny_wide,tiny generate=false $(ARGS) $(GOES_ON)
	@$(BATCHES) $(ON_REAL) method=exspec,ragged batch_size=1,8 $(ARGS) $(GOES_ON)
	@$(BATCHES) $(ON_REAL) method=eqspec batch_size=8 $(ARGS) $(GOES_ON)
	@$(BATCHES) $(OF_TINY) settings=published method=exspec,ragged batch_size=1,8 $(ARGS) $(GOES_ON)
	@$(BATCHES) $(OF_TINY) settings=published method=eqspec batch_size=8 $(ARGS) $(GOES_ON)
	@$(PY) -m specbench.report claims runs/claims

wandb-compare: $(STAMP) ## Tables over a group of runs on Weights & Biases: GROUP=name [ARGS="--project name --entity name"]
	@$(PY) -m specbench.commands.log compare "$(GROUP)" $(ARGS)

docs: $(STAMP) ## Build the documentation into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "build/site/index.html; with its search: $(PY) -m http.server --directory build/site"

readme-figures: $(STAMP) ## Measure the rows of a results page in rounds and write table and plots [ARGS="--pair smollm2-135m"; RUNS="FOLDER ..." takes finished runs]
	@$(PY) docs/figures.py $(RUNS) $(ARGS)

lint: $(STAMP) ## Check style, formatting and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

clean: ## Remove .venv and caches; results in runs/, and what was trained or measured into build/, stay
	@rm -rf $(VENV) build/bdist.* build/lib build/mypy build/pycache build/site dist *.egg-info
	@rm -rf .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A candidate is run, not only looked for: a name on the path may be a launcher for a Python that is not there.
$(PY):
	@for python in $(PYTHONS); do \
		if "$$python" -c '$(SUITABLE)' >/dev/null 2>&1; then \
			echo "making $(VENV) with $$("$$python" --version)"; \
			"$$python" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; \
			exit 0; \
		fi; \
	done; \
	echo "error: no Python 3.11 to 3.13 found (tried: $(PYTHONS)); install one and try again" >&2; exit 1

$(STAMP): pyproject.toml constraints.txt | $(PY)
	@echo "installing into $(VENV) (once; several minutes on a slow line)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
